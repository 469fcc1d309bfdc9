"""Second runs.

**In**: a graph run that is still open.

**Out**: what only a second run can tell: counts, values in kernels, where it raised, all checks.
"""
