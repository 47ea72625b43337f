"""The user's data as microbatches."""
