"""Guarded models: this package ties the others together.

**In**: a model and options.

**Out**: the model, guarded; what was found goes to whoever asked.
"""
