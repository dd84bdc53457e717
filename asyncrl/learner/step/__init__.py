"""One training step, from a batch to applied weights or a refusal."""
