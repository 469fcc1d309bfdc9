"""The kernels that read ranges on a GPU. They are imported only if Triton is installed.

With ``TRITON_INTERPRET=1``, set before Triton is imported, they run on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["DTYPES", "read_range", "read_ranges"]

DTYPES = {  # by the names that torch prints
    "torch.float16": tl.float16,
    "torch.bfloat16": tl.bfloat16,
    "torch.float32": tl.float32,
    "torch.float64": tl.float64,
}


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


@triton.jit(
    do_not_specialize=["addresses", "sizes", "ends", "rounds"],
    do_not_specialize_on_alignment=["rows"],
)
def read_ranges(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    ends,
    rows,
    rounds,
    most: tl.constexpr,
    block: tl.constexpr,
    count: tl.constexpr,
    dtype: tl.constexpr,
    alignment: tl.constexpr,
):
    """The same of many pieces of memory in one launch; the table of them is among its arguments.

    Args:
        addresses: of the elements of each piece, as integers.
        sizes: for each, twice the number of its elements and one. (Triton makes a kernel of its own
            for an argument of 1 and for a multiple of 16; addresses are always such a multiple.)
        ends: for each, twice the number of programs that read it or one before it, and one.
            Beyond the last piece that is the number of all programs.
        rows: two integers for each piece, one after the other.
        rounds: how many blocks each program reads.
        most: as above.
        block: as above.
        count: how many pieces the table has room for.
        dtype: of the elements.
        alignment: the number of bytes of which each address is a multiple.
    """
    is_wide: tl.constexpr = most > 0x7FFFFFFF
    integer: tl.constexpr = tl.int64 if is_wide else tl.int32
    program = tl.program_id(0)
    itself = 2 * program + 1
    piece = program * 0
    before = piece  # programs that read earlier pieces
    size = sizes[0]
    address = addresses[0]
    for place in tl.static_range(1, count):
        end = ends[place - 1]
        is_later = itself >= end
        piece = tl.where(is_later, place, piece)
        before = tl.where(is_later, end, before)
        size = tl.where(is_later, sizes[place], size)
        address = tl.where(is_later, addresses[place], address)
    size = size >> 1
    before = before >> 1
    x = tl.multiple_of(address.to(tl.pointer_type(dtype)), alignment)
    low = tl.full([block], most, integer)
    high = tl.full([block], 0, integer)
    inside = tl.arange(0, block)
    for turn in range(rounds):
        first = ((program - before).to(tl.int64) * rounds + turn) * block
        if first + block <= size:
            value = tl.load(x + first + inside)
            if not is_wide:
                value = value.to(tl.float32)
            bits = value.to(integer, bitcast=True) & most
            low = tl.minimum(low, bits)
            high = tl.maximum(high, bits)
        elif first < size:
            is_there = first + inside < size
            value = tl.load(x + first + inside, mask=is_there, other=0.0)
            if not is_wide:
                value = value.to(tl.float32)
            bits = value.to(integer, bitcast=True) & most
            low = tl.minimum(low, tl.where(is_there, bits, most))
            high = tl.maximum(high, bits)
    row = rows + 2 * piece
    tl.atomic_min(row, tl.min(low, 0))
    tl.atomic_max(row + 1, tl.max(high, 0))
