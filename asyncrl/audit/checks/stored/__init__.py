"""Checks of what is stored as bytes beside the ledger's rows: prefixes, turns and a teacher's scores."""
