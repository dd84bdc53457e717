"""Backends, which hold the model and compute: in one process (`torch`), or in many."""
