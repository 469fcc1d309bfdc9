"""The fingerprint of one tensor: mean, norm, and sums with seeded signs.

The numbers depend only on the elements and their indices: not on strides, the device, the process,
the number of threads (except for the last bits of float64), or the state of any random generator.

**Signs.** :func:`splitmix64` is the generator of Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", 2014. Bits of its first ``2 * BLOCK`` numbers form a table of
signs. Elements are read in blocks of ``BLOCK``; block ``j`` has the signs of the table from
position ``splitmix64(SEED_OF_BLOCKS, j) % BLOCK`` on. So each block has different signs without
computing any per element: ``s_i = table[place(i // BLOCK) + i % BLOCK]``. No compiler can trace
this module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.formats import limit_of
from fxguard.measure.at_hand import has_memory, name_of_dtype, own_arithmetic
from fxguard.measure.func_levels import without_levels
from fxguard.measure.traceable import SPARSE_ROWS, has_numbers, inside, numbers
from fxguard.records import NOT_MEASURED, Fingerprint

__all__ = ["BLOCK", "PROJECTIONS", "fingerprint_of", "sign", "splitmix64"]

BLOCK = 2**16  # elements: with fewer, calls of torch take as long as the sums; 3 MB of table
PROJECTIONS = 2  # one detects a swap of two elements with probability 1/2, two with 3/4
BITS = (0, 32)  # of a number of the generator: the signs of each projection
SEED, SEED_OF_BLOCKS = 0x66786775, 0x61726421

PIECE = 2**20  # elements of a strided tensor that are copied at a time

WIDE = ("cpu", "cuda", "xpu")  # devices with float64; elements of others go to the CPU

TOO_LARGE = "its squares are beyond float64"


def splitmix64(seed: int, index: int) -> int:
    """Number ``index`` of a sequence of pseudo-random integers of 64 bits.

    Example:
        >>> hex(splitmix64(0, 0))
        '0xe220a8397b1dcdaf'
    """
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def sign(projection: int, index: int) -> int:
    """The sign of one element in one projection, +1 or -1; slow, but defines what is meant."""
    block, place = divmod(index, BLOCK)
    return 1 - 2 * (splitmix64(SEED, _place_of(block) + place) >> BITS[projection] & 1)


def fingerprint_of(value: Any) -> Fingerprint:
    """The fingerprint of a tensor.

    Args:
        value: a tensor of any dtype and shape. Integers and booleans count as numbers. A wrapper
            subclass of one tensor counts as that tensor; a DTensor as its part on this rank.

    Returns:
        Its numbers, or a note that says why there are none: it is sparse, not a tensor, or made of
        several. A healthy model must not raise because a tensor supports few operations.

    Example:
        >>> x = torch.tensor([3.0, -4.0, math.inf])
        >>> found = fingerprint_of(x)
        >>> found.count, found.left_out, found.mean, found.norm
        (3, 1, -0.5, 5.0)
    """
    try:
        with own_arithmetic():
            elements = _elements(value)
            return Fingerprint(note=elements) if isinstance(elements, str) else _taken(elements)
    except theirs():  # such as no kernel for a dtype, or no memory
        return Fingerprint(note=NOT_MEASURED)


def _elements(value: Any) -> Tensor | str:
    """A dense tensor of real numbers with the elements, or the reason why there is none."""
    if not isinstance(value, Tensor):
        return "not one tensor"
    value = without_levels(value)
    if parts := inside(value):
        return _elements(parts[0]) if len(parts) == 1 else "made of several tensors"
    if value.is_meta:
        return "meta"
    if not has_numbers(value) or not has_memory(value):
        return NOT_MEASURED
    if value.layout is torch.sparse_coo or value.layout in SPARSE_ROWS:
        return "sparse"  # its storage does not tell the order of elements
    value = value.detach()
    if value.is_nested or value.is_quantized or value.layout is not torch.strided:
        value = numbers(value)
    if value.is_complex():
        value = torch.view_as_real(numbers(value).resolve_conj())
    here: Tensor = value if value.device.type in WIDE else value.cpu()
    return here


def _taken(value: Tensor) -> Fingerprint:
    count = value.numel()
    limit = limit_of(name_of_dtype(value.dtype))
    limit = math.inf if math.isnan(limit) else limit
    left_out, (total, *projected, squares) = 0, _sums(value)
    if not squares < limit * limit:  # an element may be at the limit or not finite
        left_out, (total, *projected, squares) = _sums_of_finite(value, limit)
        if not math.isfinite(squares):
            return Fingerprint(count, left_out, note=TOO_LARGE)
    taken = count - left_out or 1
    return Fingerprint(
        count,
        left_out,
        total / taken,
        math.sqrt(squares),
        tuple(each / math.sqrt(taken) for each in projected),
    )


def _sums(value: Tensor) -> list[float]:
    """Sums of the elements, of the elements with signs, and of their squares."""
    sums, squares = _zeros(value)
    for block, signs in _blocks(value):
        sums, squares = sums.addmv(signs, block), squares + block.dot(block)
    return [*sums.tolist(), squares.item()]


def _sums_of_finite(value: Tensor, limit: float) -> tuple[int, list[float]]:
    """The same sums of the elements below a limit, and the number of other elements."""
    sums, squares = _zeros(value)
    left_out = torch.zeros((), dtype=torch.int64, device=value.device)
    for block, signs in _blocks(value):
        kept = block.abs() < limit  # False for NaN
        left_out += len(block) - kept.sum()
        block = torch.where(kept, block, 0.0)
        sums, squares = sums.addmv(signs, block), squares + block.dot(block)
    return int(left_out), [*sums.tolist(), squares.item()]


def _zeros(value: Tensor) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(PROJECTIONS + 2, dtype=torch.float64, device=value.device)
    return sums[:-1], sums[-1]


def _blocks(value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements in float64, in order, with their factors: ones, and signs.

    Blocks are parts of the blocks that define the signs. The second tensor has shape ``[1 +
    PROJECTIONS, length]``.
    """
    table, index = _table(value.device), 0
    for piece in _pieces(value):
        start = 0
        while start < len(piece):
            block, place = divmod(index, BLOCK)
            length = min(BLOCK - place, len(piece) - start)
            at = _place_of(block) + place
            wide = piece[start : start + length].to(torch.float64)
            yield wide, table[:, at : at + length]
            start, index = start + length, index + length


def _pieces(value: Tensor) -> Iterator[Tensor]:
    """The elements in the order of their indices, in flat pieces; at most one piece is copied.

    An expanded tensor may have far more elements than memory.
    """
    if value.numel() <= PIECE or value.is_contiguous():
        yield value.reshape(-1)
        return
    of_row = value.numel() // len(value)
    if of_row > PIECE:
        for row in value:
            yield from _pieces(row)
    else:
        for rows in value.split(PIECE // of_row):
            yield rows.reshape(-1)


@functools.lru_cache(maxsize=2**16)
def _place_of(block: int) -> int:
    """The position in the table where the signs of a block begin."""
    return splitmix64(SEED_OF_BLOCKS, block) % BLOCK


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Ones, and the signs of each projection: float64 of shape ``[1 + PROJECTIONS, 2 * BLOCK]``."""
    with torch.inference_mode(False):
        drawn = _drawn(2 * BLOCK)
        signs = [1 - 2 * (drawn >> bit & 1) for bit in BITS]
        table: Tensor = torch.stack([torch.ones_like(drawn), *signs]).to(device, torch.float64)
    return table


def _drawn(count: int) -> Tensor:
    """``splitmix64(SEED, i)`` for the first indices, in int64 arithmetic, which wraps."""

    def signed(number: int) -> int:
        return number - 2**64 if number >= 2**63 else number

    def shifted(z: Tensor, bits: int) -> Tensor:
        return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)  # without sign extension

    z = torch.arange(1, count + 1, device="cpu") * signed(0x9E3779B97F4A7C15) + SEED
    z = (z ^ shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * signed(0x94D049BB133111EB)
    return torch.bitwise_xor(z, shifted(z, 31))
