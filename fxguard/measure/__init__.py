"""Ranges of tensors: the smallest and the largest magnitude.

**In**: a tensor.

**Out**: its range, as two numbers that stay on its device, or the reason why there is none.
"""
