"""The output that a user reads.

**In**: records.

**Out**: text, tables, JSON, a chart, a page. Nothing here knows torch.
"""
