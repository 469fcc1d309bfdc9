"""What is wrong with a training that raises nothing and makes no NaN.

**In**: losses, gradients and optimizers' steps of a guarded model.

**Out**: quiet faults, each once: what was seen, at which line, and what to do.
"""
