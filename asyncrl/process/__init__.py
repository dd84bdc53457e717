"""What every process of a run does to start, to log and to end."""
