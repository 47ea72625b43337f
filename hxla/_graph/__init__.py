"""The traced loss."""
