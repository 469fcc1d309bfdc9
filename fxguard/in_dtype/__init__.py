"""A copy of a model in another dtype: run from the same start, and how far off it is."""
