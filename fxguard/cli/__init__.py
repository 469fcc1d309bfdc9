"""The command ``fxguard``.

**In**: a command line, a script.

**Out**: the script's run, watched; its exit status; tables and pages of what was found.
"""
