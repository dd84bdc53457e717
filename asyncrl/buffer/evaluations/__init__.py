"""Evaluations: held-out sets, each played by one pinned version, outside admission, training data and the equation.

sets.py        which sets are open, due, done; what the learner is told
open_set.py    the tickets of one open set, and its results
players.py     which actors play
places.py      the numbers of evaluation tickets
"""
