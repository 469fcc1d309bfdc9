"""One batch of a model, operation by operation, as a folder that another process can read.

**In**: a model and what it is given.

**Out**: its operations with their operands, results and lines; weights, inputs and outputs.
"""
