"""Second runs.

**In**: a graph run that is still open.

**Out**: what only another run can tell: counts, what a kernel hides, where it raised, all checks.
"""
