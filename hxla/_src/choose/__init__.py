"""All makers of plans: annotations, meshes, stages, memory, counts, the search."""
