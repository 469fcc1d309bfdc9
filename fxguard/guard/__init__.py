"""Guarded models: this package ties the others together.

**In**: a model and options.

**Out**: the guarded model; findings go to whoever asked for them.
"""
