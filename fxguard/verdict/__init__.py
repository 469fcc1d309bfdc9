"""What went wrong, and where.

**In**: the data flow of a batch.

**Out**: origins, or "healthy"; a Report.
"""
