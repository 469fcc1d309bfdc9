"""One call of the model, as it happens.

**In**: graph runs, operations between graphs, modules that return.

**Out**: a closed batch with numbers, its data flow and its frames.
"""
