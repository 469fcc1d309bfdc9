"""What people call: a model, a stretch of a script or a function is guarded with the tools.

**In**: a model and the user's options.

**Out**: the guarded model, with the tools that the options ask for.
"""
