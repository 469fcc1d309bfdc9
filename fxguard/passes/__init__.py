"""Transformations of graphs.

**In**: a graph and its Plan.

**Out**: another graph: with checks, with planted faults, without marks.
"""
