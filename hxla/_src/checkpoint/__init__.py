"""State on disk, and in memory between generations."""
