"""Traced batches of a guarded model.

**In**: batches, losses, backward passes and steps, as they happen.

**Out**: all of their frames, in a file or printed, with fingerprints.
"""
