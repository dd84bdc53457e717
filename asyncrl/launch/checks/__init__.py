"""Checks of the user's parts before anything starts: their form, the first tasks, one reset, packages, the model."""
