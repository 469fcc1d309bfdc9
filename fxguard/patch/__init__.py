"""A fix as a change of the user's own file.

**In**: a report, and the file that the report blames.

**Out**: a unified diff, or the reason why there is none.
"""
