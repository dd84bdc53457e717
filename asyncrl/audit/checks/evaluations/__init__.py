"""Checks of the evaluation sets and of the stops that their results asked for."""
