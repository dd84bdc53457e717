"""Compares what independent witnesses say about a run: `asyncrl audit` and `asyncrl replay`."""
