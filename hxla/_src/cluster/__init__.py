"""Devices: described, detected, measured."""
