"""What a script computes beside its models.

**In**: each operation that it runs, and what that made.

**Out**: a batch of what is bad, when that matters.
"""
