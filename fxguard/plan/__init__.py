"""The Plan of a graph: everything that is known before there are numbers.

**In**: an FX graph.

**Out**: its Plan: values, steps, frames, checks. No numbers.
"""
