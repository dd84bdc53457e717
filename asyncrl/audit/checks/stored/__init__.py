"""Checks of what is stored as bytes beside the ledger's rows: recorded turns and a teacher's scores."""
