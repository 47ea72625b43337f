"""From a model and a plan to compiled programs."""
