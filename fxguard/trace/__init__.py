"""Traces: frames of whole batches, kept in files.

**In**: frames of whole batches.

**Out**: files, and where two of them diverge. Nothing here knows torch.
"""
