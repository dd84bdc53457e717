"""Times of a plan from the record of a run."""
