"""The plan: who holds and computes what."""
