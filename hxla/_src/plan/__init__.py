"""The plan: which device holds and computes what."""
