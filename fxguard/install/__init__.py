"""A guard in front of a model.

**In**: a model.

**Out**: a model whose calls go to a guard, in each form in which it is captured, and back.
"""
