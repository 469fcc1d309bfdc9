"""The elements of one tensor in the layout of another one that holds the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    "apart",
    "core_of",
    "distance",
    "in_layout_of",
    "layouts_of",
    "mask_of",
    "nearest_layout",
    "order_of_rows",
]

MOST_DIMENSIONS = 5  # whose orders are tried
LARGEST_CORE = 2**22  # elements
LETS_NOTHING_PASS = -1e3  # added to a score
MOST_SORTED = 1e-6  # tolerance: numbers drawn from one distribution have nearly the same order


def in_layout_of(x: Tensor, like: Tensor, tolerance: float) -> Tensor | None:
    """The elements of ``x`` where ``like`` has them; None if no order makes them equal.

    Args:
        x: as many elements as ``like``.
        like: another tensor.
        tolerance: of a difference, relative to the largest magnitude.
    """
    for candidate in layouts_of(x, like):
        if apart(candidate, like) <= tolerance:
            return candidate
    return _sorted_like(x, like, tolerance)


def nearest_layout(x: Tensor, like: Tensor, carried: Tensor | None = None) -> Tensor | None:
    """The elements of ``x`` in the order of dimensions that is nearest to another tensor.

    Args:
        x: as many elements as ``like``.
        like: another tensor.
        carried: a tensor of the shape of ``x`` to be returned in its place, in that order.
    """
    orders = list(layouts_of(x, like))
    if not orders:
        return None
    far = [distance(each, like) for each in orders]
    at = far.index(min(far))
    return orders[at] if carried is None else list(layouts_of(carried, like))[at]


def apart(x: Tensor, y: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest finite magnitude of them."""
    if not x.numel():
        return 0.0
    if not (x.is_floating_point() or x.is_complex() or y.is_floating_point() or y.is_complex()):
        return 0.0 if torch.equal(x.to(torch.int64), y.to(torch.int64)) else 1.0
    same = x == y
    if y.dtype == torch.bool:
        y = y.to(x.dtype)
    difference = torch.where(same, 0.0, (x.to(y.dtype) - y).abs())
    if not bool(torch.isfinite(difference).all()):
        return 1.0
    finite = torch.where(torch.isfinite(y), y.abs(), 0.0)
    largest = float(finite.max())
    return float(difference.max()) / largest if largest else float(difference.max() > 0)


def layouts_of(x: Tensor, like: Tensor) -> Iterator[Tensor]:
    """The elements of ``x`` in the shape of ``like``, for each order of its dimensions."""
    if x.shape == like.shape:
        yield x
    squeezed = x.squeeze()
    seen: set[tuple[int, ...]] = set()
    if squeezed.dim() <= MOST_DIMENSIONS:
        for order in itertools.permutations(range(squeezed.dim())):
            yield squeezed.permute(order).reshape(like.shape)
            seen.add(order)
    other = like.squeeze()
    if 2 < other.dim() <= MOST_DIMENSIONS and other.dim() > squeezed.dim():
        for order in itertools.permutations(range(other.dim())):
            shape = [other.shape[at] for at in order]
            back = [order.index(at) for at in range(len(order))]
            yield x.reshape(shape).permute(back).reshape(like.shape)


def _sorted_like(x: Tensor, like: Tensor, tolerance: float) -> Tensor | None:
    """Each element of ``like`` replaced by that of ``x`` with the same place in order of size."""
    if x.is_complex() or like.is_complex() or tolerance > MOST_SORTED:
        return None
    ordered, positions = x.flatten().sort().values, like.flatten().argsort()
    found = torch.empty_like(ordered)
    found[positions] = ordered
    found = found.reshape(like.shape)
    return found if apart(found, like) <= tolerance else None


def order_of_rows(x: Tensor, y: Tensor) -> Tensor | None:
    """For each row of ``x`` the equal row of ``y``; None if rows are not equal, or most repeat.

    Of rows that repeat, as those of each sample may, the first is the first.
    """
    if x.shape != y.shape:
        return None
    x, y = x.to(torch.float64), y.to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(x.shape[1], generator=generator, dtype=torch.float64)
    along = torch.stack((x @ direction, y @ direction))
    scale = float(along.abs().max()) or 1.0
    if not bool(torch.isfinite(along).all()):
        return None
    (mine, theirs), (order, other) = (along / scale * 1e7).round().sort(stable=True)
    if 2 * int((mine.diff() <= 10).sum()) > len(mine):
        return None
    if float((mine - theirs).abs().max()) > 1:
        return None
    found = torch.empty_like(order)
    found[order] = other
    return found


def distance(x: Tensor, y: Tensor) -> float:
    """How far two tensors are apart, relative to the larger root mean square; 1.4 if unrelated."""
    masks = mask_of(x), mask_of(y)
    x, y = (each if mask is None else mask for each, mask in zip((x, y), masks, strict=True))
    x, y = x.to(torch.float64), y.to(torch.float64)
    finite = torch.isfinite(x) & torch.isfinite(y)
    unlike = float((torch.isfinite(x) != torch.isfinite(y)).double().mean())
    x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    norm = max(float(x.norm()), float(y.norm()))
    return unlike + (float((x - y).norm()) / norm if norm else 0.0)


def core_of(x: Tensor) -> Tensor:
    """A tensor without dimensions along which nothing changes: one slice of them is kept."""
    if x.numel() > LARGEST_CORE or not x.numel():
        return x
    for at in range(x.dim()):
        if x.shape[at] > 1:
            first = x.narrow(at, 0, 1)
            if x.stride(at) == 0 or bool((x == first).all()):
                x = first
    return x.squeeze()


def mask_of(x: Tensor) -> Tensor | None:
    """What a mask lets pass; None for any other tensor.

    A mask holds True and False, 1 and 0, or 0 and a large negative number.
    """
    if x.dtype == torch.bool:
        mask = x
    elif not x.is_floating_point() or not x.numel():
        return None
    else:
        largest, smallest = x.max(), x.min()
        if (float(largest), float(smallest)) != (1.0, 0.0) and not (
            largest == 0 and smallest <= LETS_NOTHING_PASS
        ):
            return None
        if not bool(((x == largest) | (x == smallest)).all()):
            return None
        mask = x == largest
    return None if bool(mask.all()) or not bool(mask.any()) else mask
