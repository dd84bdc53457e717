"""The scores that come with asyncrl."""
