"""What the outputs of a model depend on: other samples, later positions, padding.

**In**: a model and its inputs.

**Out**: three answers, each from runs on other inputs, with the operation that leaks and a path.
"""
