"""Runs each operation twice on the same operands, and compares the bits of what it made.

An operation that draws random numbers, that only views, or that may wait for other ranks runs once.
One that writes its operands runs a second time on copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.graph.operations import is_collective
from fxguard.graph.written_operands import written_operands
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.func_levels import has_levels
from fxguard.quiet._bits import BITS
from fxguard.quiet._memory import Memory
from fxguard.torch_names import TorchDispatchMode

__all__ = ["DOCUMENTED", "Twice", "Unlike", "difference", "same_bits"]

ONCE = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"]) | {
    *("detach", "alias", "_local_scalar_dense", "item", "set_", "resize_", "is_same_size", "lift"),
    *("record_stream", "_to_copy_", "empty_permuted", "rand", "randn", "lift_fresh"),
}
PLAIN = (Tensor, torch.nn.Parameter)
# torch.use_deterministic_algorithms lists these: kernels on a GPU, and two that a CPU runs in
# parallel. Names are those of ATen, without "_backward" and a final "_".
DOCUMENTED = frozenset(
    [
        *("bincount", "cumsum", "histc", "index_add", "index_copy", "index_put", "kthvalue"),
        *("_index_put_impl", "put", "scatter_add", "scatter", "scatter_reduce", "median"),
        *("embedding_dense", "embedding_bag", "_embedding_bag", "index_select", "gather"),
        *("grid_sampler_2d", "grid_sampler_3d", "_ctc_loss", "nll_loss2d", "max_unpool2d"),
        *("convolution", "cudnn_convolution", "avg_pool3d", "adaptive_avg_pool2d"),
        *("adaptive_avg_pool3d", "max_pool3d_with_indices", "adaptive_max_pool2d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "upsample_linear1d"),
        *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
        *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d"),
        *("replication_pad2d", "replication_pad3d", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("repeat_interleave", "max_pool2d_with_indices", "max_unpool3d"),
    ]
)


@dataclass(frozen=True, slots=True)
class Unlike:
    """What did not repeat."""

    operation: str  # of ATen: "mm"
    evidence: str  # how many elements, and the first one
    # Whether further runs agree with each other: then one run was wrong. Otherwise the kernel
    # gives other bits each time.
    is_once: bool
    is_documented: bool = False  # as nondeterministic, by torch


class Twice(TorchDispatchMode):
    """The mode under which operations run twice.

    Args:
        unlike: called with what did not repeat, while the operation runs.
        memory: what tensors held when they were made.

    Attributes:
        count: how many operations ran twice.
        once: how many ran once that may differ: other kinds of tensors, or no memory.
    """

    def __init__(self, unlike: Callable[[Unlike], None], memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations
        self.unlike, self.memory = unlike, memory
        self.count = self.once = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _may_repeat(func):
            return func(*args, **kwargs)
        given = [x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(map(_is_plain, given)):
            self.once += 1
            return func(*args, **kwargs)
        with own_arithmetic():
            for tensor in given:
                bit = self.memory.flipped(tensor)
                if bit is not None:
                    evidence = f"bit {bit} of one of {tensor.numel()} elements that it reads"
                    evidence += " changed in memory since they were made"
                    self.unlike(Unlike(_name(func), evidence, is_once=True))
        written = written_operands(func, args, kwargs)
        if getattr(func, "namespace", "") != "aten":  # of others, which may not say what they write
            written = list({id(x): x for x in given}.values())
        try:
            before = {id(x): x.clone() for x in written}
        except RuntimeError:  # no memory for copies
            self.once += 1
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        made = [*_tensors(result), *written]
        if not all(map(_is_plain, made)) or (written and _overlap(written, given)):
            self.once += 1
            return result
        try:
            with own_arithmetic():
                self._compare(func, args, kwargs, before, made)
                self.memory.note(made)
        except theirs():  # no memory for a second result, or an operation that runs once
            self.once += 1
        return result

    def _compare(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Mapping[int, Tensor],
        made: Sequence[Tensor],
    ) -> None:
        def again() -> list[Tensor]:
            copies = {key: x.clone() for key, x in before.items()}
            given = trees.tree_map_only(Tensor, lambda x: copies.get(id(x), x), (args, kwargs))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = func(*given[0], **given[1])
            return [*_tensors(result), *(copies[id(x)] for x in made if id(x) in copies)]

        self.count += 1
        second = again()
        pairs = [(x, y) for x, y in zip(made, second, strict=True) if not same_bits(x, y)]
        if not pairs:
            return
        third, fourth = again(), again()
        repeats = all(map(same_bits, third, fourth))
        is_once = repeats and (
            all(map(same_bits, second, third)) or all(map(same_bits, made, third))
        )
        name = _name(func)
        is_documented = not is_once and name.removesuffix("_backward").rstrip("_") in DOCUMENTED
        self.unlike(Unlike(name, difference(*pairs[0]), is_once, is_documented))


def _may_repeat(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or getattr(func, "is_view", False):
        return False
    return _name(func) not in ONCE and not is_collective(func)


def _name(func: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return str(getattr(func, "__name__", func)).split(".")[0]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not has_levels(tensor)
    )


def _tensors(result: Any) -> Iterator[Tensor]:
    return (x for x in trees.tree_leaves(result) if isinstance(x, Tensor))


def _overlap(written: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether other operands may share memory with one that is written: a copy would not."""
    memory = {x.untyped_storage()._cdata for x in written}
    ids = {id(x) for x in written}
    others = [x for x in given if id(x) not in ids]
    return len(memory) < len(written) or any(x.untyped_storage()._cdata in memory for x in others)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN of the same bits are the same."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one, two) or torch.equal(_as_bits(one), _as_bits(two))


def _as_bits(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    size = tensor.element_size()
    return tensor.detach().contiguous().view(BITS[size]) if size in BITS else tensor


def difference(one: Tensor, two: Tensor) -> str:
    """``1 of 64 elements: [3, 5] was 6.1e+04, then 1.5 (1 bit)``."""
    apart = _as_bits(one) != _as_bits(two)
    count = int(apart.sum())
    index = apart.nonzero()[0]
    bits_a, bits_b = (int(_as_bits(x)[tuple(index)]) for x in (one, two))
    mask = (1 << (8 * one.element_size())) - 1
    flipped = ((bits_a ^ bits_b) & mask).bit_count()
    at = list(map(int, index))[: one.dim()]
    a, b = (x[tuple(at)].item() for x in (one, two))
    numbers = f"{a:.7g}, then {b:.7g}" if isinstance(a, float) else f"{a}, then {b}"
    also = f" ({flipped} bit{'s' if flipped > 1 else ''})" if count == 1 else ""
    return f"{count} of {one.numel()} elements: {at or 'it'} was {numbers}{also}"
