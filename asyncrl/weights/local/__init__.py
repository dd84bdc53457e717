"""Policy versions handed over in shared memory, for processes of one host."""
