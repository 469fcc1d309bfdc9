"""A failing operation as a test.

**In**: an operation that was blamed, with its operands.

**Out**: the text of a test that fails, with operands that are as small as possible.
"""
