"""Several processes, and the network between them.

**In**: this process.

**Out**: its rank, the findings of other ranks, weights under FSDP; the network check.
"""
