"""`asyncrl try`: a few training episodes with the initial model, without buffer and learner, and what they foretell."""
