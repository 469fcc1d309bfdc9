"""Two models on the same inputs, or one model in two dtypes.

**In**: two models, or one, and inputs.

**Out**: how far apart they are, element by element, and the operation where they first differ.
"""
