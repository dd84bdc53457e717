"""Where processes are started: this machine, or the nodes of a Ray cluster."""
