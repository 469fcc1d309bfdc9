"""Two recordings of what should be the same computation, whoever wrote the programs.

**In**: two recordings.

**Out**: which values are the same, where the programs part, and how much that matters.
"""
