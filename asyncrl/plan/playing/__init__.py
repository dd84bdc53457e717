"""A run on a virtual clock: the buffer's own code, and a world that only takes time."""
