"""What XLA really did."""
