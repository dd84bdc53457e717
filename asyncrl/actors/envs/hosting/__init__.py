"""Environments in worker processes (`env.workers`)."""
