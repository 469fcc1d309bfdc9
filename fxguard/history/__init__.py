"""What a training run has measured, step by step, and why its loss jumped.

**In**: the ranges of each step of a guarded model, or a folder of an earlier run.

**Out**: a folder that other programs read too, and events: what changed first, and when.
"""
