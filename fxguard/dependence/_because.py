"""What about an operation lets something through that does not belong there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from fxguard.dependence._recording import Made, Read
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES
from fxguard.graph.wide_form import is_float
from fxguard.records import Source
from fxguard.report.dependencies import PathStep
from fxguard.source.attributes import attribute_line

__all__ = ["Reason", "Reasons"]

# What turns scores of pairs into weights: a mask has to stand before it.
WEIGHING = frozenset(["softmax"])
ATTENTION = frozenset(["scaled_dot_product_attention", "multi_head_attention_forward"])
PRODUCTS = frozenset(["matmul", "bmm", "baddbmm", "einsum", "mm", "mul", "cdist", "rmatmul"])
REDUCES = frozenset(
    [
        *("amax", "amin", "argmax", "max", "mean", "median", "min", "norm", "prod", "std", "sum"),
        *("cumprod", "cumsum", "flip", "roll", "logsumexp", "log_softmax", "softmax", "normalize"),
        *("var", "var_mean"),
    ]
)
RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
BIDIRECTIONAL = 7  # the position of the argument
BATCH_FIRST = 8
MASK_AT = {"attn_mask": 3}  # of `scaled_dot_product_attention`
FARTHEST = 16  # operations from a product of pairs to the softmax of it
HIDES = -4.0  # a number that is added to scores to hide some
# A mask is the same behind these, or its contrary; what brings it into another order may be wrong.
PASSED = (
    MOVES | CASTS | frozenset(["bitwise_not", "getitem", "invert", "logical_not", "eq", "ne"])
) - frozenset(["flip", "repeat", "repeat_interleave", "roll", "tile"])


class Reason(NamedTuple):
    """The operation to look at, and what about it."""

    step: PathStep
    text: str = ""


class Reasons:
    """What about operations of a run.

    Args:
        model: the model that ran.
        values: of the run.
        is_data: whether the input of a name is data, rather than a mask or lengths.
        hides: whether a mask has to hide something: positions, or padding.
    """

    def __init__(
        self,
        model: Module,
        values: Sequence[Made],
        is_data: Callable[[str], bool],
        *,
        hides: bool,
    ) -> None:
        self.model, self.values, self.is_data, self.hides = model, values, is_data, hides

    def of(self, way: Sequence[int]) -> Reason:
        """The operation of a path that leaks, and the line of the program that calls its library.

        Args:
            way: indices of values: the first that is wrong, and what leads from there to the
                output.
        """
        reason = self._of(way)
        of = next(x for x in self.values if x.step is reason.step)
        if of.caller is None:
            return reason
        return Reason(reason.step, "; ".join(filter(None, [reason.text, f"called at {of.caller}"])))

    def _of(self, way: Sequence[int]) -> Reason:
        first = self.values[way[0]]
        assert first.step is not None
        kind = plain(first.kind)
        if kind in PRODUCTS and self.hides:
            # Scores are of pairs: it is the mask that has to hide some.
            for at, i in enumerate(way[:FARTHEST]):
                if plain(self.values[i].kind) in WEIGHING:
                    return self._by_masks(way[: at + 1], way[at + 1 :])
        if kind in WEIGHING and self.hides:
            return self._by_masks(way[:1], way[1:])
        if kind in ATTENTION:
            return self._of_attention(first)
        return Reason(first.step, self._text(first))

    def _by_masks(self, before: Sequence[int], behind: Sequence[int]) -> Reason:
        """The mask between a product and a softmax, or that there is none."""
        values, on_way = self.values, {*before, *behind}
        found = [
            (self._rank(values[i], values[read]), i, read)
            for i in self._up_to(before)
            for read in values[i].reads
            if read not in on_way and self._may_mask(read)
        ]
        masks = [each for each in found if each[0]]
        softmax = values[before[-1]]
        assert softmax.step is not None
        if masks:
            _, i, read = max(masks)
            step = values[i].step
            return Reason(step or softmax.step, self._of_mask(read, step))
        for i in behind[:FARTHEST]:  # what is hidden behind the softmax was weighed by it
            value = values[i]
            if plain(value.kind) in PRODUCTS - {"mul"}:
                break
            if value.step and any(self._rank(value, values[read]) for read in value.reads):
                return Reason(value.step, f"it hides what the {softmax.kind} has weighed already")
        return Reason(softmax.step, f"no mask hides anything from this {softmax.kind}")

    def _up_to(self, before: Sequence[int]) -> Iterator[int]:
        """Values on the way to a softmax; for a softmax alone, what it was computed from."""
        if len(before) > 1:
            yield from before
            return
        at = before[0]
        for _ in range(FARTHEST):
            yield at
            reads = [i for i in self.values[at].reads if not self._may_mask(i)]
            if not reads or plain(self.values[at].kind) in PRODUCTS - {"mul"}:
                return
            at = reads[0]

    def _rank(self, into: Made, mask: Made) -> int:
        """How sure it is that an operation hides something by a value; 0 if it does not."""
        x = mask.tensor
        if x.dim() < 1 or x.numel() < 2:
            return 0
        if x.dtype is torch.bool:
            return 3
        least = float(x.min())
        if not is_float(x) or plain(into.kind) == "mul":
            return 2 if bool(((x == 0) | (x == 1)).all()) and least == 0 else 0
        if plain(into.kind) not in ("add", "sub", "iadd", "radd", "where", "masked_fill"):
            return 0
        return 2 if least < -1000 else int(bool((x == 0).any()) and least <= HIDES)

    def _may_mask(self, index: int) -> bool:
        return self.values[index].tensor.dtype is torch.bool or self._is_apart(index)

    def _is_apart(self, index: int) -> bool:
        """Whether a value depends on no data: it was made of masks, buffers and constants."""
        todo, seen = [index], {index}
        for i in todo:
            value = self.values[i]
            if value.given and self.is_data(value.given):
                return False
            todo += (more := [x for x in value.reads if x not in seen])
            seen.update(more)
        return True

    def _of_mask(self, index: int, applied: PathStep | None) -> str:
        """Where a mask was made, behind what only moves or negates it."""
        value = self.values[index]
        here = applied.source.position if applied and applied.source else None
        while value.step is not None:
            source = value.step.source
            moves = plain(value.kind) in PASSED - {"eq", "ne"}
            if source is not None and source.position != here and not moves:
                return f"its mask is made at {source}"
            if not value.reads:
                return "its mask lets it through"
            value = self.values[value.reads[0]]
        if value.given:
            return f"its mask is the input {value.given}"
        line = self._line_of(value.kept)
        return f"its mask is {value.kept}" + (f", made at {line}" if line else "")

    def _of_attention(self, attention: Made) -> Reason:
        step = attention.step
        assert step is not None
        module = self._module(attention)
        is_first = not isinstance(module, torch.nn.MultiheadAttention) or module.batch_first
        if not self.hides and not is_first:
            text = "batch_first=False: it attends along dimension 0"
            return Reason(step, self._built(attention, text))
        masks = [
            each
            for name in ("attn_mask", "key_padding_mask")
            if isinstance(each := _given(attention, name, MASK_AT.get(name, FARTHEST)), Read)
        ]
        known = [each.held for each in masks if each.held is not None]
        if known:
            return Reason(step, self._of_mask(known[0], step))
        if masks:
            return Reason(step, "its mask lets it through")
        if attention.kwargs.get("is_causal") is True:
            return Reason(step, "it is causal, and has no mask")
        return Reason(step, "it has no mask, and is not causal")

    def _text(self, made: Made) -> str:
        """What is known about an operation by its arguments."""
        kind = plain(made.kind)
        if kind == "batch_norm":
            module = self._module(made)
            own = getattr(module, "track_running_stats", True)
            mode = "in training mode" if own else "with track_running_stats=False"
            text = f"{mode} its statistics are those of the whole batch"
            return text if own else self._built(made, text)
        if kind in ("group_norm", "instance_norm"):
            return self._built(made, "its statistics are those of all positions")
        if kind in RECURRENT and len(made.args) > BATCH_FIRST:
            if made.args[BIDIRECTIONAL] is True:
                return self._built(made, "it runs in both directions")
            if made.args[BATCH_FIRST] is False and not self.hides:
                return self._built(made, "batch_first=False: it runs along dimension 0")
        padding = _given(made, "padding", 4) if kind.startswith("conv") else None
        if padding not in (None, 0, (0,)):
            return self._built(made, f"it pads both sides, by {_plain(padding)}")
        if kind.startswith("fft_"):
            return "a Fourier transform as long as the sequence wraps around: pad it to twice that"
        if kind in REDUCES and made.reads:
            return self._along(made, kind)
        return ""

    def _along(self, made: Made, kind: str) -> str:
        shape = list(self.values[made.reads[0]].tensor.shape)
        dim = _given(made, "dim", 1)
        if dim is not None:
            return f"it runs over dimension {_plain(dim)} of {shape}"
        if kind not in ("softmax", "log_softmax"):
            return ""
        dim = 0 if len(shape) in (0, 1, 3) else 1  # as torch chooses it
        return self._built(made, f"without dim= it runs over dimension {dim} of {shape}")

    def _module(self, made: Made) -> Module | None:
        return self.model.get_submodule(made.module) if made.module else None

    def _built(self, made: Made, text: str) -> str:
        """A text about a module, with the line that made the module."""
        line = self._line_of(made.module)
        return f"{text} (made at {line})" if line else text

    def _line_of(self, path: str) -> Source | None:
        """The line that made a module or a buffer, or what contains it."""
        while path:
            parent, _, name = path.rpartition(".")
            line = attribute_line(type(self.model.get_submodule(parent)), name)
            if line is not None:
                return line
            path = parent
        return None


def _given(made: Made, name: str, position: int) -> Any:
    if name in made.kwargs:
        return made.kwargs[name]
    return made.args[position] if len(made.args) > position else None


def _plain(value: Any) -> str:
    items = list(value) if isinstance(value, (tuple, list)) else [value]
    return ", ".join(map(str, items))
