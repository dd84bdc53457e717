"""`asyncrl try`: plays a few training episodes with the initial model, and says what would go wrong in training."""
