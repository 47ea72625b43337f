"""Devices: described, found, measured."""
