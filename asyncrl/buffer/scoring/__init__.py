"""Scores of a teacher on servers (`learner.teacher.scored_by: servers`): which scorer has which group, and what came.

waiting, unscored ──lease──> a scorer ──scores──> waiting, scored: a batch may take it
        ^                       │
        └──lapsed, given back───┘     the first valid scores win
"""
