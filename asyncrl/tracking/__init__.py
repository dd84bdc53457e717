"""Metrics of a run: the table of series, reporter and collector, sinks, the terminal view, the report."""
