"""Samples of what is trained on, with text (`tracking.rollouts`): written by the learner, read by anyone."""
