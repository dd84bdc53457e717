"""What is durable: the SQLite ledger, its history of branches, the payloads beside it."""
