"""Who is a member of a run, from generation to generation: values and pure functions."""
