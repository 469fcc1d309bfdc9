"""What one operation is, in a graph or between graphs.

**In**: a node of an FX graph, or a call that Python makes.

**Out**: its name, what it reads, writes, draws and hides, and which line made it.
"""
