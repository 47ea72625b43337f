"""Schedules of pipelines as tables, and their replay."""
