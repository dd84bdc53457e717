"""Who may produce which trajectory: tickets, leases, failures, what an interrupted attempt left."""
