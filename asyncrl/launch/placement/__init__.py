"""Which GPUs each process of a run has: decided here for one machine, by Ray for a cluster."""
