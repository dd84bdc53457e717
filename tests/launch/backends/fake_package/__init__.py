"""A fake role, for forks."""
