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
    "torch.bool": tl.uint8,
    "torch.uint8": tl.uint8,
    "torch.int8": tl.int8,
    "torch.int16": tl.int16,
    "torch.int32": tl.int32,
    "torch.int64": tl.int64,
}


@triton.jit
def bits_of(value, most: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of magnitudes, as integers of which the largest is ``most``."""
    if most > 0x7FFFFFFF:
        return value.to(tl.int64, bitcast=True) & most
    else:  # noqa: RET505 - Triton compiles one of the two
        return value.to(tl.float32).to(tl.int32, bitcast=True) & most


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
    integer: tl.constexpr = tl.int64 if most > 0x7FFFFFFF else tl.int32
    low = tl.full([block], most, integer)
    high = tl.full([block], 0, integer)
    inside = tl.arange(0, block)
    for turn in range(rounds):
        first = (tl.program_id(0) + turn * programs).to(tl.int64) * block
        if first + block <= size:  # without a mask, elements are loaded several at a time
            value = tl.load(x + first + inside)
            bits = bits_of(value, most)
            low = tl.minimum(low, bits)
            high = tl.maximum(high, bits)
        else:
            is_there = first + inside < size
            value = tl.load(x + first + inside, mask=is_there, other=0.0)
            bits = bits_of(value, most)
            low = tl.minimum(low, tl.where(is_there, bits, most))
            high = tl.maximum(high, bits)
    tl.atomic_min(row, tl.min(low, 0))
    tl.atomic_max(row + 1, tl.max(high, 0))


@triton.jit(
    do_not_specialize=["addresses", "sizes", "ends", "places", "lengths", "strides", "rounds"],
    do_not_specialize_on_alignment=["rows"],
)
def read_ranges(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    ends,
    places,
    lengths,
    strides,
    rows,
    rounds,
    most: tl.constexpr,
    block: tl.constexpr,
    count: tl.constexpr,
    dtype: tl.constexpr,
    alignment: tl.constexpr,
    has_gaps: tl.constexpr,
):
    """The same of many pieces of memory in one launch; the table of them is among its arguments.

    Numbers in the table are above 0, and given as twice the number and one: Triton makes a kernel
    of its own for an argument of 1 and for a multiple of 16.

    Args:
        addresses: of the first element of each piece, as integers.
        sizes: how many elements each has.
        ends: for each, how many programs read it or one before it; beyond the last piece, all.
        places: the row of each, counted from 1.
        lengths: how many elements follow each other, where there are gaps.
        strides: the distance from where they begin to where the next ones do, likewise.
        rows: two integers for each row.
        rounds: how many blocks each program reads.
        most: as above.
        block: as above.
        count: how many pieces the table has room for.
        dtype: of the elements.
        alignment: the number of bytes of which each address is a multiple.
        has_gaps: whether there may be gaps between elements.
    """
    integer: tl.constexpr = tl.int64 if most > 0x7FFFFFFF else tl.int32
    program = tl.program_id(0)
    itself = 2 * program + 1
    before = program * 0  # programs that read earlier pieces
    size = sizes[0]
    place = places[0]
    address = addresses[0]
    length = lengths[0]
    stride = strides[0]
    for piece in tl.static_range(1, count):
        end = ends[piece - 1]
        is_later = itself >= end
        before = tl.where(is_later, end, before)
        size = tl.where(is_later, sizes[piece], size)
        place = tl.where(is_later, places[piece], place)
        address = tl.where(is_later, addresses[piece], address)
        if has_gaps:
            length = tl.where(is_later, lengths[piece], length)
            stride = tl.where(is_later, strides[piece], stride)
    address = address >> 1
    size = size >> 1
    before = before >> 1
    length = length >> 1
    stride = stride >> 1
    x = tl.multiple_of(address.to(tl.pointer_type(dtype)), alignment)
    low = tl.full([block], most, integer)
    high = tl.full([block], 0, integer)
    inside = tl.arange(0, block)
    for turn in range(rounds):
        first = ((program - before).to(tl.int64) * rounds + turn) * block
        if first + block <= size and not has_gaps:
            value = tl.load(x + first + inside)
            bits = bits_of(value, most)
            low = tl.minimum(low, bits)
            high = tl.maximum(high, bits)
        elif first < size:
            element = first + inside
            is_there = element < size
            if has_gaps:
                element = element.to(tl.int32)
                line = element // length
                element = line.to(tl.int64) * stride + (element - line * length)
            value = tl.load(x + element, mask=is_there, other=0)
            bits = bits_of(value, most)
            low = tl.minimum(low, tl.where(is_there, bits, most))
            high = tl.maximum(high, bits)
    row = rows + 2 * ((place >> 1) - 1)
    tl.atomic_min(row, tl.min(low, 0))
    tl.atomic_max(row + 1, tl.max(high, 0))
