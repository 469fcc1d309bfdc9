"""Models in other dtypes.

**In**: a model that is healthy in its own dtype.

**Out**: what fails in another one.
"""
