"""Several processes, and the network between them.

**In**: this process.

**Out**: its rank, what the other ranks found, what FSDP does with weights; the network check.
"""
