"""A job, traced once for each microbatch size."""
