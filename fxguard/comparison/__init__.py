"""Two models on the same inputs.

**In**: two models, and inputs.

**Out**: how far apart they are, element by element, and the operation where they first differ.
"""
