"""The processes of a live run: what follows when one ends, and how all of them are stopped."""
