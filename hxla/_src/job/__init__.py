"""What is trained, traced once for each microbatch size."""
