"""Where the digits of a model's output went.

**In**: a model, its inputs, a dtype, and the number that matters.

**Out**: how wrong that number is in the dtype, and which lines that comes from.
"""
