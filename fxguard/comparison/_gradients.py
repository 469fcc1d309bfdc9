"""The gradients of two models: how far apart they are, and which side is nearer to float64."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.comparison._arguments import Arguments, weights_by_twin
from fxguard.comparison._backwards import Backwards
from fxguard.comparison._carried import Carried
from fxguard.comparison._moves import moved_weights
from fxguard.comparison._recorded import nodes_of
from fxguard.comparison._rounding import OF_WEIGHTS, apart, gap_of, in_double, size_of, unit_of
from fxguard.comparison._runs import ModelRun
from fxguard.comparison._sides import Twin, standing
from fxguard.comparison._wide_edges import WideEdges, jumps
from fxguard.comparison.elements import Compared
from fxguard.graph.operations import read_node
from fxguard.graph.wide_form import NotJudged, is_float, widened
from fxguard.measure.at_hand import dtype_of, version_of
from fxguard.passes.unmark import without_marks
from fxguard.rerun.differences import relative_error
from fxguard.rerun.start import Start

__all__ = ["compare_gradients", "gradients_in_float64"]

# A gradient below this share of the model's largest one may be nothing but roundings, so errors are
# judged relative to at least that much.
SMALL = 1e-3
# What two programs may differ by in float64, relative to the largest gradient: 2^-40.
SAME_PROGRAM = 2.0**-40
# How many times larger one side's error may be than the other's, each in roundings of its dtype.
TIMES = 64


def compare_gradients(
    a: ModelRun,
    b: ModelRun,
    known: Arguments,
    arguments: Sequence[Sequence[Any]],
    rewritten: Collection[str],
    *,
    alike: bool,
) -> Iterator[Compared]:
    """Compare the gradients of each weight and input.

    Args:
        a: a run with gradients.
        b: likewise.
        known: what A has for what B's graphs read.
        arguments: what A has for each argument of each graph of B.
        rewritten: weights of B that are others than A's, and so have other gradients.
        alike: whether integers and booleans were the same in both. If not, as when a router chose
            another expert, float64 would take over other choices and cannot decide.

    Raises:
        NotJudged: when there is no backward in float64.
    """
    sizes: dict[str, float] = {}
    twins = known.twins
    own_a = [each.run.args for each in a.runs]
    chosen_a = _as_chosen(a, own_a, sizes=sizes)
    wide_a = gradients_in_float64(a, own_a, sizes=None if chosen_a else sizes)
    arguments = with_weights(b, arguments, {name: known.weights_of_b[name] for name in known.own})
    exact_b = gradients_in_float64(b, arguments, a.starts, eps_of=a.dtype)
    wide_b = weights_by_twin(exact_b, twins)
    moved = _moved(a, b, known, arguments, wide_a, wide_b)
    high_b = _wanted_of_b(a, b, twins, arguments, wide_a, exact_b)
    high_a = chosen_a or (wide_a if _has_more_digits(a, b) else high_b)
    others = {*rewritten, *(known.name_in_a(name) for name in rewritten)}
    largest = max((size_of(x) for x in wide_a.values()), default=0.0)
    gradients_b = weights_by_twin(b.gradients, twins)
    weights_b = weights_by_twin(b.parameters, twins)
    for name, low_a in a.gradients.items():
        if name in others:
            continue
        low_b = gradients_b.get(name)
        one, other = wide_a.get(name), wide_b.get(name)
        if low_b is None or low_b.shape != low_a.shape:
            if name in a.parameters and _is_another(low_a, weights_b.get(name)):
                continue  # such as three weights that were joined into one, or one that is frozen
            said = "B has no gradient there" if low_b is None else "shapes differ"
            yield Compared(name, "gradient", dtypes=(dtype_of(low_a), ""), reason=said)
            continue
        errors, reason = None, ""
        if name in high_a and name in high_b:
            size = sizes.get(name, 0.0)
            floor = max(SMALL * largest, size)
            pairs = (low_a, high_a[name]), (low_b, high_b[name])
            errors, judged = (
                (relative_error(*pairs[0], than), relative_error(*pairs[1], than))
                for than in (size, floor)
            )
            units = unit_of(low_a), unit_of(low_b)
            if alike and one is not None and other is not None:
                reason = _differs(one, other, max(units), max(largest, size), moved.get(name, 0.0))
                errors = None if reason else errors
            judged = judged if alike and errors is not None else (0.0, 0.0)
            reason = reason or _is_worse(low_a, low_b, judged, units)
        yield Compared(
            name,
            "gradient",
            dtypes=(dtype_of(low_a), dtype_of(low_b)),
            total=apart(low_a, low_b),
            errors=errors,
            reason=reason,
        )
    for name in gradients_b.keys() - a.gradients.keys():
        if name in others:
            continue
        if name in weights_b and _is_another(gradients_b[name], a.parameters.get(name)):
            continue
        dtypes = ("", dtype_of(gradients_b[name]))
        yield Compared(name, "gradient", dtypes=dtypes, reason="A has no gradient there")


def _wanted_of_b(
    a: ModelRun,
    b: ModelRun,
    twins: Mapping[str, Twin],
    arguments: Sequence[Sequence[Any]],
    wide_a: Mapping[str, Tensor],
    wide_b: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """What the gradients of B should be, by A's names.

    They are those of the side whose weights have more digits, in float64. Where a derivative jumps,
    it is the one that B has chosen: see :class:`~fxguard.comparison._wide_edges.WideEdges`.

    Args:
        a: a run with gradients.
        b: likewise.
        twins: the weight of A that each weight of B is.
        arguments: what A has for each argument of each graph of B.
        wide_a: A's gradients in float64.
        wide_b: those of B's program for A's arguments, by B's names.
    """
    if not _has_more_digits(a, b):
        own = [each.run.args for each in b.runs]
        return weights_by_twin(_as_chosen(b, own) or gradients_in_float64(b, own), twins)
    chosen = _as_chosen(b, arguments, a.starts, a.dtype)
    by_choice = {name: x - wide_b[name] for name, x in chosen.items() if name in wide_b}
    moved = weights_by_twin(by_choice, twins)
    return {name: x + moved.get(name, 0.0) for name, x in wide_a.items()}


def _has_more_digits(a: ModelRun, b: ModelRun) -> bool:
    """Whether A's gradients have as many digits as B's, or more."""
    return unit_of(*a.gradients.values()) <= unit_of(*b.gradients.values())


def _as_chosen(
    model: ModelRun,
    arguments: Sequence[Sequence[Any] | None],
    starts: Sequence[tuple[Tensor, Tensor]] | None = None,
    eps_of: torch.dtype | None = None,
    sizes: dict[str, float] | None = None,
) -> dict[str, Tensor]:
    """The gradients in float64 with the model's derivatives where they jump; {} if none does."""
    if not any(
        jumps(read_node(node, owner))
        for kept in model.runs
        for _, node, owner in nodes_of(without_marks(kept.run.graph_module))
    ):
        return {}
    return gradients_in_float64(model, arguments, starts, sizes, eps_of, as_model=True)


def _is_another(gradient: Tensor, weight: Tensor | None) -> bool:
    """Whether the other model has no such weight, or asks for no gradient of it."""
    return weight is None or weight.shape != gradient.shape or not weight.requires_grad


def _moved(
    a: ModelRun,
    b: ModelRun,
    known: Arguments,
    arguments: Sequence[Sequence[Any]],
    wide_a: Mapping[str, Tensor],
    wide_b: Mapping[str, Tensor],
) -> dict[str, float]:
    """How far each gradient moves with roundings of the weights that only one model has."""
    found: dict[str, float] = {}
    given = [each.run.args for each in a.runs]
    for model, names, weights, args, starts, eps_of, before in (
        (a, known.unshared[0], known.weights, given, None, None, wide_a),
        (b, known.unshared[1], known.weights_of_b, arguments, a.starts, a.dtype, wide_b),
    ):
        if not names:
            continue
        moved = with_weights(model, args, moved_weights(weights, names, 0))
        after = gradients_in_float64(model, moved, starts, eps_of=eps_of)
        after = after if model is a else weights_by_twin(after, known.twins)
        for name, x in before.items():
            if name in after and after[name].shape == x.shape:
                found[name] = max(found.get(name, 0.0), size_of(gap_of(x, after[name])))
    return found


def with_weights(
    model: ModelRun, arguments: Sequence[Sequence[Any] | None], weights: Mapping[str, Tensor]
) -> list[list[Any]]:
    """The arguments of each graph, with other values for some weights."""
    found = []
    for kept, values in zip(model.runs, arguments, strict=True):
        assert values is not None
        made = list(values)
        for position, name in standing(kept.run).items():
            made[position] = weights.get(name, made[position])
        found.append(made)
    return found


def _differs(one: Tensor, other: Tensor, unit: float, largest: float, moved: float) -> str:
    """Why two programs have different gradients in float64; "" if they have the same."""
    one, other = in_double(one), in_double(other)
    allowed = unit * size_of(one) + SAME_PROGRAM * largest + OF_WEIGHTS * moved
    gap = float(gap_of(one, other).max()) if one.numel() else 0.0
    if gap <= allowed:
        return ""
    size = max(size_of(one), size_of(other))
    return f"not roundings: in float64, too, the two gradients are {gap / size:.2g} apart"


def _is_worse(
    low_a: Tensor, low_b: Tensor, errors: tuple[float, float], units: tuple[float, float]
) -> str:
    finite = [bool(x.isfinite().all()) for x in (low_a, low_b)]
    if finite[0] != finite[1]:
        return f"it is finite in {'A' if finite[0] else 'B'} only"
    for mine, theirs, side in ((0, 1, "A"), (1, 0, "B")):
        allowed = TIMES * units[mine] * max(errors[theirs] / units[theirs], 1.0)
        if errors[mine] > allowed:
            return (
                f"{side} is {errors[mine]:.2g} from float64, more than {TIMES} times as many "
                f"roundings as the other side has"
            )
    return ""


def gradients_in_float64(
    model: ModelRun,
    arguments: Sequence[Sequence[Any] | None],
    starts: Sequence[tuple[Tensor, Tensor]] | None = None,
    sizes: dict[str, float] | None = None,
    eps_of: torch.dtype | None = None,
    *,
    as_model: bool = False,
) -> dict[str, Tensor]:
    """The gradients of weights and inputs, in float64 from the beginning.

    Args:
        model: a model that has run.
        arguments: the arguments of each graph: its own, or another model's.
        starts: the gradient that comes in at each output; the model's own if not given.
        eps_of: the dtype of which norms have their eps; None for that of the model.
        sizes: gets the size of each gradient if nothing had cancelled in the sums that it is.
        as_model: whether derivatives that jump are those at the operands of the model as it ran.

    Raises:
        NotJudged: when there is no backward in float64, or the model returned something that is not
            an output of a graph.
    """
    carried: Carried[Tensor] = Carried()
    leaves: dict[str, Tensor] = {}
    inputs = {id(x): f"input {number}" for number, x in enumerate(model.given)}
    backwards = Backwards(draws=sizes is not None)
    for kept, values in zip(model.runs, arguments, strict=True):
        args, names = kept.run.args, standing(kept.run)
        assert args is not None
        assert values is not None
        wide: list[Any] = []
        for position, (argument, value) in enumerate(zip(args, values, strict=True)):
            if not is_float(argument) or not is_float(value):
                wide.append(argument)
                continue
            known = carried.of(argument, kept.versions[position])
            if known is None:
                name = names.get(position) or inputs.get(id(argument), f"{id(argument)}")
                if name not in leaves:
                    leaf = widened(value, torch.float64).clone()
                    leaves[name] = leaf.requires_grad_(argument.requires_grad)
                known = leaves[name]
            wide.append(known.clone())
        form = WideEdges(torch.float64, backwards, eps_of, as_model=as_model)
        start = Start(kept.run)
        with start.begun() as low, torch.enable_grad():
            _, made = start.walk(low, form, others=wide)
        for output, version, other in zip(kept.outputs, kept.output_versions, made, strict=True):
            if is_float(output):
                high = widened(other, torch.float64, differentiable=True)
                carried.keep(output, version, high)
    ends = [carried.of(x, version_of(x)) for x, _ in model.starts]
    outputs = [x for x in ends if x is not None and x.requires_grad]
    if len(outputs) != len(ends):
        raise NotJudged("what the model returned was not made by a captured graph alone")
    drawn = [gradient for _, gradient in (starts or model.starts)]
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found, of_drawn = backwards.of_reference(outputs, list(asked.values()), drawn)
    if sizes is not None:
        sizes |= zip(asked, of_drawn, strict=True)
    return {name: x for name, x in zip(asked, found, strict=True) if x is not None}
