"""How advice begins that other parts of a verdict look for.

Knows nothing of torch.
"""

from __future__ import annotations

__all__ = ["ASKS_BACK", "BOUND", "GREW", "IN_LOGS", "LOOKS", "MASK", "MASKS", "REJECT"]

MASKS = ("mask with ", "take masked_fill")  # how advice begins that comes before a trial
GREW = "look at what its operands grew from"  # how advice begins that a climb makes precise
IN_LOGS = "work in logs"  # how advice begins that no bound replaces
REJECT = "reject a proposal"  # how advice begins that a sampler needs
BOUND = "bound "  # how advice begins that bounds an argument
LOOKS = "look at "  # how advice begins that names no change
ASKS_BACK = (LOOKS, BOUND)  # how advice begins that asks for what led there
MASK = "mask with masked_fill, where or a boolean mask: nothing fits beside the dtype's limit"
