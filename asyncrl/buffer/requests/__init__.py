"""Requests to the buffer: what answers each, those that wait, and the replies that wait for a commit."""
