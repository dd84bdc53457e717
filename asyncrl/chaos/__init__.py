"""`asyncrl chaos`: a run under seeded faults, and what must hold at its end."""
