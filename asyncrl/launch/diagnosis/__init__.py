"""Who waits for whom: stalls, stacks, `asyncrl why`, `asyncrl status`."""
