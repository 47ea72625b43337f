"""Makers of plans."""
