"""How policy versions travel from the learner to the actors."""
