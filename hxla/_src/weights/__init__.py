"""Weights in files: read into a plan's layout, and written from it."""
