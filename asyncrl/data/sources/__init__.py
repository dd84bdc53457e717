"""The task sources that come with asyncrl."""
