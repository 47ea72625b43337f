"""Times and bytes of a model, measured or estimated."""
