"""A run of training."""
