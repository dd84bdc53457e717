"""Which task is drawn next."""
