"""One process per accelerator: start, join, throttle, end."""
