"""Values, errors and settings that every part shares."""
