"""What is padding: what inputs tell of it, or the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.dependence._inputs import Inputs
from fxguard.errors import UsageError
from fxguard.graph.wide_form import is_float

__all__ = ["Told", "told_padding"]

LENGTHS = ("len", "num_", "count", "n_")  # in names of inputs that are lengths
PADS = ("pad", "pad_id", "pad_idx", "pad_index", "pad_token", "pad_token_id", "padding_idx")
LEAST_RUN = 2  # equal tokens at an end that are padding, if several samples end so


@dataclass(frozen=True)
class Told:
    """Padding, and how the model is told of it."""

    padding: Tensor  # [batch, length], boolean
    by: str  # "attention_mask", "token 0 of ids", "padding="
    inputs: frozenset[int]  # that it is padding of, and their masks, by index
    in_data: bool = False  # whether the data itself tells, so that it must stay what it is


def told_padding(model: Module, inputs: Inputs, padding: Tensor | int | None) -> Told | None:
    """What of the inputs is padding; None if nothing tells.

    Args:
        model: the one that is given them.
        inputs: its inputs.
        padding: what the user says: a boolean tensor, ``[batch, length]``, or the token.

    Raises:
        UsageError: for a tensor that is not of this form.
    """
    if isinstance(padding, Tensor):
        if padding.dtype is not torch.bool or padding.dim() != 2:
            raise UsageError("padding= is a boolean tensor, [batch, length], or the token")
        return Told(padding, "padding=", _of(inputs, padding), _tells(inputs, padding))
    if padding is None:
        for at, (x, name) in enumerate(zip(inputs.tensors, inputs.names, strict=True)):
            if x is inputs.main or not x.dim() or x.shape[0] != inputs.batch:
                continue
            found = _by_mask(x, name.lower()) if inputs.is_mask(at) else _by_length(x, name, inputs)
            if found is not None:
                return Told(found, name, _of(inputs, found, at))
    return _by_token(model, inputs, padding)


def _of(inputs: Inputs, padding: Tensor, mask: int | None = None) -> frozenset[int]:
    """The inputs that some padding is padding of.

    Of two sequences of one length each may have its own. So an input counts whose mask has its
    name, ``premise_mask`` of ``premise``; else those that hold one token, or one number, in all of
    the padding and nowhere else; else all of that length.

    Args:
        inputs: of the model.
        padding: boolean, ``[batch, length]``.
        mask: the input that tells of it, if one does.
    """
    batch, length = padding.shape
    held = [i for i, x in enumerate(inputs.tensors) if _spans(inputs, x, batch, length)]
    data = [i for i in held if not inputs.is_mask(i)]
    masks = [i for i in held if inputs.is_mask(i) and _agrees(inputs.tensors[i], padding)]
    named = inputs.names[mask] if mask is not None else ""
    own = [i for i in data if inputs.names[i].split("_")[0] in named.split("_")]
    filled = [i for i in data if _is_filled(inputs, i, padding)]
    return frozenset([*(own or filled or data), *masks])


def _spans(inputs: Inputs, x: Tensor, batch: int, length: int) -> bool:
    samples = inputs.sample_dim(x)
    return (
        samples is not None
        and any(n == length for d, n in enumerate(x.shape) if d != samples)
        and x.shape[samples] == batch
    )


def _agrees(mask: Tensor, padding: Tensor) -> bool:
    """Whether a mask tells of this padding; one of pairs may."""
    flat = mask.reshape([n for i, n in enumerate(mask.shape) if i == 0 or n != 1])
    if flat.shape != padding.shape:
        return flat.dim() > padding.dim()
    on = (flat != 0).cpu()
    return bool((on == padding.cpu()).all()) or bool((on != padding.cpu()).all())


def _is_filled(inputs: Inputs, at: int, padding: Tensor) -> bool:
    """Whether an input holds the same in all padding, and something else everywhere else."""
    x = inputs.tensors[at]
    samples = inputs.sample_dim(x)
    dims = [d for d, n in enumerate(x.shape) if d != samples and n == padding.shape[1]]
    if samples is None or not dims:
        return False
    rows, where = x.movedim((samples, dims[0]), (0, 1)).cpu(), padding.cpu()
    held, other = rows[where], rows[~where]
    if not len(held):
        return True
    is_held = (other == held[0]).reshape(len(other), -1).all(1)
    return bool((held == held[0]).all()) and not bool(is_held.any())


def _tells(inputs: Inputs, padding: Tensor) -> bool:
    """Whether tokens tell of padding by themselves: all of it is one token, and nothing else is."""
    for at, x in enumerate(inputs.tensors):
        if not is_float(x) and x.shape == padding.shape and inputs.is_data(at):
            held = x.cpu()[padding.cpu()]
            if held.numel() and bool(((x.cpu() == held[0]) == padding.cpu()).all()):
                return True
    return False


def _by_mask(x: Tensor, name: str) -> Tensor | None:
    """What a mask says is padding: rows of one value, and at an end of some the other one."""
    x = x.reshape([size for i, size in enumerate(x.shape) if i == 0 or size != 1])
    if x.dim() != 2:
        return None
    if is_float(x) and bool(((x == 0) | (x < -1000)).all()):
        return x < 0  # added to scores
    if not bool(((x == 0) | (x == 1)).all()):
        return None
    on = x.bool()
    whole = on[(on == on[:, :1]).all(1)]  # a sample without padding is all real
    if len(whole) and bool((whole == whole[0, 0]).all()):
        return on != whole[0, 0]
    if "pad" in name:
        return on
    return on != on[:, :1] if "mask" not in name or bool((on[:, 0] == on[0, 0]).all()) else ~on


def _by_length(x: Tensor, name: str, inputs: Inputs) -> Tensor | None:
    """What lengths say is padding: they have the name, and data that is constant behind them."""
    main = inputs.main
    if x.dim() != 1 or is_float(x) or x.dtype is torch.bool or main is None:
        return None
    most = int(x.max())
    sizes = [(n, i) for i, n in enumerate(main.shape) if i != inputs.samples]
    length, dim = next(((n, i) for n, i in sizes if n >= most), (0, 0))
    if not length or int(x.min()) < 1:
        return None
    padding = torch.arange(length).expand(len(x), -1) >= x.cpu()[:, None]
    rows = main.movedim((inputs.samples, dim), (0, 1)).cpu()
    behind = rows[padding]
    is_filled = bool(padding.any()) and bool((behind == behind[:1]).all())
    if is_filled or (most == length and any(word in name.lower() for word in LENGTHS)):
        return padding
    return None


def _by_token(model: Module, inputs: Inputs, token: int | None) -> Told | None:
    """What is padding by a token that the embedding, or the configuration, names as such."""
    tokens: list[Any] = [token] if token is not None else []
    if token is None:
        owners = [*model.modules(), getattr(model, "config", None)]
        tokens = [getattr(owner, name, None) for owner in owners for name in PADS]
    for x, name in zip(inputs.tensors, inputs.names, strict=True):
        if is_float(x) or x.dtype is torch.bool or x.dim() != 2 or x.shape[0] != inputs.batch:
            continue
        known = [t for t in tokens if isinstance(t, int)]
        if token is None:
            known += _at_ends(x)
        for each in dict.fromkeys(known):
            found = x == each
            at_end = found & (_run(found) | _run(found.flip(1)).flip(1))
            if bool(at_end.any()):
                by = f"token {each} of {name}"
                return Told(at_end, by, _of(inputs, at_end), in_data=True)
    return None


def _at_ends(x: Tensor) -> list[int]:
    """The token with which several rows end, or begin, in runs of several lengths."""
    for rows in (x, x.flip(1)):
        last = rows[:, -1:]
        runs = _run((rows == last).flip(1)).sum(1)
        long = runs >= LEAST_RUN
        tokens = last[long].flatten().tolist()
        if len(tokens) > 1 and len(set(tokens)) == 1 and bool((runs < x.shape[1]).all()):
            return tokens[:1]
    return []


def _run(found: Tensor) -> Tensor:
    """The elements of each row up to the first that is False."""
    return found.long().cumprod(1).bool()
