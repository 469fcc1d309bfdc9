"""``dependencies``: whether outputs depend on other samples, later positions, padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.dependence._asked import Asked, NotRepeatable
from fxguard.dependence._inputs import Inputs
from fxguard.dependence._padding import padding as ask_padding
from fxguard.dependence._positions import positions as ask_positions
from fxguard.dependence._samples import samples as ask_samples
from fxguard.dependence._told import told_padding
from fxguard.errors import UsageError
from fxguard.forgiving import theirs
from fxguard.in_dtype.trials import Trials
from fxguard.install.instrumented import unwrapped
from fxguard.measure.at_hand import name_of_dtype
from fxguard.report.dependencies import Dependencies
from fxguard.report.late_progress import LateProgress

__all__ = ["dependencies"]


def dependencies(
    model: Module,
    *inputs: Any,
    samples: int = 0,
    positions: int | None = None,
    padding: Tensor | int | None = None,
    **named: Any,
) -> Dependencies:
    """Say whether outputs of a model depend on other samples, on later positions, on padding.

    A copy of the model runs in float64 on its inputs, and on inputs in which one sample, or all
    positions after one, are replaced by others. What changes depends on what was replaced. For
    padding, each sample runs with its padding and without it. Where an output changes, both runs
    are followed operation by operation, and the first one is named behind which values changed
    where they should not have.

    The model runs in its own mode: a batch norm mixes samples in training mode, and does not in
    evaluation. Nothing is wrong with an answer as such: an encoder may look at later positions.

    Args:
        model: any module. A copy runs; the model, its buffers and the random state stay unchanged.
        inputs: its positional arguments: a batch of at least two samples.
        samples: the dimension of samples, of inputs and outputs; masks may have them in front.
        positions: the dimension of positions, of inputs and outputs. By default dimension 1, or the
            last one where a convolution reads its input as ``[batch, channels, length]``.
        padding: what is padding, as a boolean tensor, ``[batch, length]``, or the token that is. By
            default what a mask or lengths among the inputs tell, or the token that an embedding or
            the model's configuration names.
        named: keyword arguments of the model.

    Returns:
        Three answers: :attr:`~fxguard.types.Dependencies.samples`, ``positions`` and ``padding``.
        ``depends`` is None where a question was not asked, and ``evidence`` says why.

    Raises:
        FxguardError: when the model does not run on its inputs, or gives other results each time.

    Example:
        >>> print(fxguard.dependencies(gpt, ids))
        what outputs of GPT depend on (training mode, float64)
        samples:   no output depends on another sample (all 4 were replaced)
        positions: the output at position 0 depends on position 1: ...
                   leak: blocks.0.attn masked_fill (gpt.py:31): att = att.masked_fill(mask, -inf)
                   its mask is made at gpt.py:30: mask = torch.ones(t, t).triu(2).bool()
    """
    if not isinstance(model, Module):
        raise UsageError(f"dependencies needs a torch.nn.Module, got {type(model).__name__}")
    plain = unwrapped(model)
    given = Inputs(plain, inputs, named, samples)
    if not given.tensors:
        raise UsageError("dependencies needs inputs: a batch of at least two samples")
    name = type(plain).__name__
    progress = LateProgress(f"fxguard: dependencies of {name}")
    try:
        asked = _asked(plain, given, inputs, named)
        answers = (
            ask_samples(asked, progress),
            ask_positions(plain, asked, positions, progress),
            ask_padding(asked, told_padding(plain, given, padding), progress),
        )
    finally:
        progress.end()
    dtype = name_of_dtype(asked.trials.dtype)
    return Dependencies(name, dtype, plain.training, *answers, asked.trials.runs)


def _asked(
    model: Module,
    given: Inputs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Asked:
    """The model in float64, or in its own dtype where it does not run in float64."""
    for dtype in (torch.float64, None):
        try:
            return Asked(Trials(model, args, kwargs, dtype), given)
        except NotRepeatable:
            break
        except theirs():  # no float64 kernel, or a fixed dtype
            if dtype is None:
                raise
    raise UsageError(
        f"two runs of {type(model).__name__} on the same inputs differ: nothing can be told"
    )
