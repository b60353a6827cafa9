"""Beyond one process: the same work by several workers, here or on a Ray cluster, and what a load
needs."""
