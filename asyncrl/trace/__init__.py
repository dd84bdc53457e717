"""`asyncrl trace RUN`: where the time of a run went, as a trace that Perfetto and Chrome show."""
