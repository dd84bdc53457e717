"""The faults that `asyncrl chaos` injects, one file per kind."""
