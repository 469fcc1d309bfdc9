"""The command ``fxguard``.

**In**: a command line, a script.

**Out**: a watched run of the script and its exit status; tables and pages of what was found.
"""
