"""What the ledger has on disk: its tables and their chain, payload segments, snapshots."""
