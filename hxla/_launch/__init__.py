"""Processes of a job."""
