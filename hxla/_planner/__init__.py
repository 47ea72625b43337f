"""From measured devices to a plan."""
