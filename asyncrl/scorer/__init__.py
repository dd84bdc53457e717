"""Scores complete groups with a teacher on servers (`learner.teacher.scored_by: servers`)."""
