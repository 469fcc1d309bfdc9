"""The kernel that reads a range on a GPU. It is imported only if Triton is installed.

With ``TRITON_INTERPRET=1``, set before Triton is imported, it runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["read_range"]


# Whatever the sizes, one kernel serves: only the alignment of the elements makes another one.
@triton.jit(
    do_not_specialize=["size", "programs", "rounds"], do_not_specialize_on_alignment=["row"]
)
def read_range(x, row, size, programs, rounds, most: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lower ``row[0]`` and raise ``row[1]`` to the bits of the magnitudes in a piece of memory.

    The bits of unsigned numbers, read as integers, have the same order as the numbers. inf is above
    all finite ones and NaN above inf.

    Args:
        x: the elements.
        row: two integers, with 64 bits for elements of 64 bits, else with 32.
        size: how many elements there are.
        programs: how many programs read it; they take turns with blocks.
        rounds: how many blocks each program reads.
        most: the largest of these integers.
        block: how many elements are read at once.
    """
    is_wide: tl.constexpr = most > 0x7FFFFFFF
    integer: tl.constexpr = tl.int64 if is_wide else tl.int32
    low = tl.full([block], most, integer)
    high = tl.full([block], 0, integer)
    inside = tl.arange(0, block)
    for turn in range(rounds):
        first = (tl.program_id(0) + turn * programs).to(tl.int64) * block
        if first + block <= size:  # without a mask, elements are loaded several at a time
            value = tl.load(x + first + inside)
            if not is_wide:
                value = value.to(tl.float32)
            bits = value.to(integer, bitcast=True) & most
            low = tl.minimum(low, bits)
            high = tl.maximum(high, bits)
        else:
            is_there = first + inside < size
            value = tl.load(x + first + inside, mask=is_there, other=0.0)
            if not is_wide:
                value = value.to(tl.float32)
            bits = value.to(integer, bitcast=True) & most
            low = tl.minimum(low, tl.where(is_there, bits, most))
            high = tl.maximum(high, bits)
    tl.atomic_min(row, tl.min(low, 0))
    tl.atomic_max(row + 1, tl.max(high, 0))
