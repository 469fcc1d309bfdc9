"""Precision, compiler, data, weights or loss scale: why the first origin is bad.

**In**: the first origin of a report, while what led to it is still there.

**Out**: what it is under other conditions, for :attr:`Report.why`.
"""
