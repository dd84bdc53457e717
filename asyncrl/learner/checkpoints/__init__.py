"""Checkpoints: written in the background, read back when a learner starts again."""
