"""The automatic choice of the bound on staleness, the idle slots from which it follows, and what changed."""
