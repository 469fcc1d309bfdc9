"""What the source of the user's program says. It is read, and never run.

**In**: a file and a line, or a running frame.

**Out**: the line, the statement, the names and the expressions in it.
"""
