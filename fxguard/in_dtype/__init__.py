"""A copy of a model in another dtype.

**In**: a model, its inputs, and a dtype.

**Out**: what the copy returns, as often as needed from the same start, and how far off that is.
"""
