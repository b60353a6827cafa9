"""Is the output right, and how fast is it: certification by enumeration, certification by testing, measurement."""
