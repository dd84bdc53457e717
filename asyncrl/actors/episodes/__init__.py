"""Playing one episode: turns, token-exact rows, limits, resumption, group scores."""
