"""Is the output the model's own? By enumeration on table models, and by a sequential test on real
ones."""
