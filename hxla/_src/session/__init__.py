"""A plan that runs."""
