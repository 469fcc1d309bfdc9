"""Training steps.

**In**: a watched stretch of a script: losses, backward passes, steps of optimizers.

**Out**: gradients and weights that turned bad, and what made them so.
"""
