"""Policy versions sent from host to host over ZeroMQ."""
