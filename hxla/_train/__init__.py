"""State, step, loop, data, checkpoints, watchdog, reports."""
