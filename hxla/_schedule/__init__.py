"""Schedules of pipelines as tables, their replay and their pictures."""
