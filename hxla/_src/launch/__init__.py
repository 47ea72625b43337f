"""The processes of a job, fixed or elastic."""
