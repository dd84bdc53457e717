"""Who computes: one process (`torch`), or many."""
