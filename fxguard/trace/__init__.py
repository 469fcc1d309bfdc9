"""Traces: frames of whole batches, kept.

**In**: frames of whole batches.

**Out**: files, and where two of them part. Nothing here knows torch.
"""
