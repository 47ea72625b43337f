"""The version of hxla: its only place."""

__version__ = "0.2.0"
