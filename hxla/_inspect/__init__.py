"""What XLA made of a program: collectives, memory and work, in the user's own words."""
