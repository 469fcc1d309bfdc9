"""``compare``: two models, two records, or a model and a record."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.comparison.compare import compare as compare_models
from fxguard.comparison.result import Comparison
from fxguard.errors import UsageError
from fxguard.in_dtype.placed import converter, place_of
from fxguard.install.instrumented import unwrapped
from fxguard.matching.match import compare_recordings
from fxguard.recording.ranks import read_record
from fxguard.recording.recorded import Recording
from fxguard.recording.running import recorded
from fxguard.report.run_comparison import RunComparison

__all__ = ["compare"]

AN_INPUT = re.compile(r"input\[(\w+)\]")
IN_MEMORY = 2**33  # bytes of a recording that no folder is made of


@overload
def compare(
    a: Module,
    b: Module,
    /,
    *inputs: Any,
    tolerance: float | None = ...,
    output_tolerance: float | None = ...,
    gradients: bool = ...,
    **kwargs: Any,
) -> Comparison: ...


@overload
def compare(
    a: Module | str | os.PathLike[str],
    b: Module | str | os.PathLike[str],
    /,
    *inputs: Any,
    tolerance: float | None = ...,
    output_tolerance: float | None = ...,
    gradients: bool = ...,
    **kwargs: Any,
) -> Comparison | RunComparison: ...


def compare(
    a: Module | str | os.PathLike[str],
    b: Module | str | os.PathLike[str],
    /,
    *inputs: Any,
    tolerance: float | None = None,
    output_tolerance: float | None = None,
    gradients: bool = True,
    **kwargs: Any,
) -> Comparison | RunComparison:
    """Say where two models, or two runs that were recorded, compute something else.

    **Two models** are called with the same inputs, and the results of every operation are compared
    by elements. Each operation of B also runs on the operands that the same operation of A had,
    rounded to B's dtypes. Its result is compared with the result of A's operation: the difference
    is its *own* error. The rest of the difference is *inherited* from earlier operations. Weights
    are compared by name, without conversion.

    A divergence is *significant* in one of five cases. A weight of B is not A's weight, rounded to
    the coarser of their dtypes. The two operations differ in float64 on the same operands, by more
    than one rounding of the coarser dtype. One of the two is further from float64 than 16 roundings
    of its result and of its operands explain, on its own operands. The output of a compiled graph
    is 16 times as far from float64 as its operations are in eager mode. An output is another one:
    in float64, on A's inputs and weights, the two models return other values.

    Two models may be written in two ways. Operations correspond that read the same; the rest by
    name and order. If the models return the same in float64 all the same, and gradients are the
    same, operations that do not correspond are listed, and are no divergence.

    If every operation is within its roundings, roundings still add up on the way. Then each output
    has a tolerance, and :attr:`Comparison.outcome` is "precision" where one is beyond it. Then
    :attr:`Comparison.budget` says which lines of the model with fewer digits that comes from.

    With ``gradients=True``, the gradients of all weights and inputs that require one are compared.
    The backward starts from the ``loss`` that the model returns, or else from all its outputs, with
    gradients drawn from a normal distribution. If gradients differ in float64 and the forward does
    not, each operation's backward is compared alone.

    Both models see the same random numbers. If the models are of different dtypes or on different
    devices, floating-point inputs are converted to the dtype of each model's first floating-point
    parameter, and all inputs are moved to its device. The inputs, the buffers (running statistics),
    the gradients of weights and the random state are left unchanged. Inside fused kernels a
    compiled model has no values to compare, so its captured graphs run in eager mode, and the
    outputs of the compiled graphs are compared with that run.

    **Folders** that :func:`fxguard.record` wrote, in this process or another one, are compared by
    what values hold and not by names: two engines may have other modules, other names, weights that
    are fused, transposed or permuted, and other fused operations. So are a model beside a folder,
    and two models that differ and have no name of a weight in common. B runs again in float64 on
    A's values, and each of its values is looked for among A's. Where that ends is a
    :class:`RunDivergence <fxguard.types.RunDivergence>`, with the operation and the line of both
    sides. If the programs are the same, the lines are listed whose roundings make the outputs
    differ.

    Args:
        a: any module that is not instrumented, the result of ``torch.compile``, or a folder.
        b: likewise; two modules may be the same module, one of them compiled. A folder may hold the
            records of several ranks, which are put together; A is then one process.
        inputs: positional arguments of the models: any nest of tensors and other objects. Beside a
            folder, a model may be given none: it is given what the folder holds.
        tolerance: of two models, the largest own error, relative to the largest magnitude of A's
            result, that is not significant. None lets float64 judge. It also applies to ranges: see
            :func:`fxguard.diff`.
        output_tolerance: how far apart each output may be where no operation is to blame: the root
            mean square of the difference, relative to that of A's output. None for 4 units of
            roundoff of each model, added as independent errors are: 3.4e-7 for two models in
            float32; 0.2 % for float32 and float16, 1.6 % for float32 and bfloat16. Weights that
            only one model has, such as folded ones, may be off by as many, and outputs by what
            that moves. Integers and booleans have to be equal. Of runs that were recorded, 32 units
            in float32.
        gradients: of two models, whether to also compare gradients. Under ``torch.no_grad`` there
            are none. Of folders, those are compared that were recorded.
        kwargs: keyword arguments of the models.

    Returns:
        Everything that was compared; ``first`` is the first significant divergence, and ``outcome``
        says what was found: a :class:`RunComparison <fxguard.types.RunComparison>` for runs that
        were recorded, and for models that share no name of a weight. While B is compared, all
        values of A's forward stay in memory, as for a backward; of runs also in float64.

    Raises:
        FxguardError: when a model is instrumented already, a tolerance is negative, or a folder is
            no record that can be read.
        Exception: whatever a model raises, unless fxguard found a bad value that led to it: then
            the ranges of what ran before are compared.

    Example:
        >>> print(fxguard.compare(model, copy.deepcopy(model).half(), input_ids))
        >>> assert fxguard.compare(model, torch.compile(model), input_ids).agrees
        >>> print(fxguard.compare("trainer", "engine"))
    """
    if isinstance(a, Module) and isinstance(b, Module):
        found = compare_models(
            a,
            b,
            *inputs,
            tolerance=tolerance,
            output_tolerance=output_tolerance,
            gradients=gradients,
            **kwargs,
        )
        if found.agrees or tolerance is not None or not _are_strangers(a, b):
            return found
        runs = [_run(model, inputs, kwargs) for model in (a, b)]
        by_values = compare_recordings(*runs, output_tolerance=output_tolerance)
        return found if by_values.outcome == "not compared" else by_values
    for side in (a, b):
        if not isinstance(side, (Module, str, os.PathLike)):
            raise UsageError(
                f"compare needs two torch.nn.Modules, or folders, got {type(side).__name__}"
            )
    if output_tolerance is not None and not output_tolerance >= 0:
        raise UsageError(f"output_tolerance has to be 0 or more, got {output_tolerance!r}")
    if tolerance is not None:
        raise UsageError("tolerance is for two models; runs have output_tolerance")
    folders = [None if isinstance(x, Module) else read_record(Path(x)) for x in (a, b)]
    given: tuple[tuple[Any, ...], dict[str, Any]] = inputs, kwargs
    if None in folders and not (inputs or kwargs):
        given = _held(next(x for x in folders if x is not None))
    runs = [
        folder if folder is not None else _run(model, *given)
        for model, folder in zip((a, b), folders, strict=True)
    ]
    return compare_recordings(*runs, output_tolerance=output_tolerance)


def _are_strangers(a: Module, b: Module) -> bool:
    """Whether two models have weights, and no name of one in common, nor one inside the other."""
    one, two = ([f".{name}" for name, _ in unwrapped(x).named_parameters()] for x in (a, b))
    pairs = [(x, y) for x in one for y in two]
    return bool(pairs) and not any(x.endswith(y) or y.endswith(x) for x, y in pairs)


def _held(folder: Recording) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a folder says that its model was given."""
    args: dict[int, Tensor] = {}
    named: dict[str, Any] = {}
    for leaf in folder.leaves:
        if leaf.kind != "input":
            continue
        place = AN_INPUT.fullmatch(leaf.name)
        if place is None or leaf.value not in folder.data:
            raise UsageError(f"the folder does not hold {leaf.name} as a tensor: give the inputs")
        if place[1].isdecimal():
            args[int(place[1])] = folder.data[leaf.value]
        else:
            named[place[1]] = folder.data[leaf.value]
    if sorted(args) != list(range(len(args))):
        raise UsageError("an argument between the tensors of the folder is none: give the inputs")
    return tuple(args[at] for at in sorted(args)), named


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    convert = converter(place_of(unwrapped(model)))
    given = trees.tree_map_only(Tensor, convert, (args, kwargs))
    with torch.random.fork_rng(devices=[]):
        return recorded(model, given[0], given[1], IN_MEMORY)[0]
