"""What the run says about itself: the table of series, who sends them, where they go, the terminal view, the report."""
