"""Train: advantages, losses, corrections, packing, backends, checkpoints, the loop."""
