"""Checks of what was drawn: tasks, demonstrations and the states of the curriculum."""
