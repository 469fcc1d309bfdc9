"""Causes of bad values, and what to do about them.

**In**: one blamed operation: its numbers, and what stands around it in the data flow.

**Out**: its cause, and fixes, in words. Nothing here knows torch.
"""
