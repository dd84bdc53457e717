"""The memory and the arithmetic of a training step, computed from the configuration before anything starts."""
