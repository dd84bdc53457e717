"""What every process of a run does to start, to be watched and to end."""
