"""Values, errors and settings that every room shares."""
