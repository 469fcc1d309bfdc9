"""Operations that make numbers 0 because their dtype cannot hold them.

**In**: a batch in which nothing was found.

**Out**: a report on what underflowed, if that was asked for.
"""
