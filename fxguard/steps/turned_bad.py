"""Weights that are bad in a batch, and that the batch before had read and found good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch.nn import Module

from fxguard.batch.late_writes import LateWrites
from fxguard.batch.lent_weights import is_lent
from fxguard.batch.weights import Snapshot, StandingTensors
from fxguard.findings import Fix, Origin
from fxguard.graph.nodes import class_name
from fxguard.records import Role
from fxguard.report.report import Report
from fxguard.source.lines import source_at
from fxguard.source.parameter_loops import writes_of_parameters
from fxguard.steps.known_steps import KnownSteps
from fxguard.steps.step_hooks import step_that_runs
from fxguard.steps.step_rules import told_writes
from fxguard.verdict.report_of import Finished

__all__ = ["with_last_good"]

NOT_WATCHED = (
    "run the loop in `with fxguard.watch(model):`, which names the optimizer's step that does it"
)
IN_LOOP = "look at {}, which writes parameters: {}; no step of torch.optim wrote these"
NO_STEP = "look at what writes weights between these batches: no step of torch.optim did"
WATCHED = "look at what writes weights between these batches besides the steps that are watched"
BY_HAND = "look at {}, which writes it after the backward: {}"
WROTE = "look at {}, which wrote it before this call: {}"
BY_SCALE = (
    "skip the update of {}: the loss scale of {:g} made gradients of batch {} not finite, and "
    "only scaler.step(optimizer) would have skipped it"
)
IN_STEP = "look at what {}'s step, which calls the model, writes into these weights{}"
LENT = "look at what computed it: this call was given it in place of the model's own weight"
BY_STEP = "fix what the report of batch {} names: {} wrote it into these weights"


def with_last_good(
    report: Report,
    last: Finished | None,
    absorbed: Iterable[Origin],
    model: Module | None,
    standing: StandingTensors,
    *,
    held_as: str,
    steps: KnownSteps,
) -> Report:
    """The report, with the batch since which each bad weight is bad.

    Args:
        report: the report.
        last: the batch that finished last.
        absorbed: what earlier batches found and judged harmless.
        model: the model that has the weights.
        standing: the model's weights and buffers.
        held_as: the name of the model, with which the names in the report begin; "" for none.
        steps: what is known of its training steps.
    """
    if model is None:
        return report
    writes = None if steps.writes is None else steps.writes()
    spoilt, excused = steps.spoilt, steps.excused
    if last is None or last.batch.ended is None:
        return _with_writers(report, model, held_as, writes)
    if last.report is not None or last.batch.number >= report.batch_number:
        return report
    read = {
        run.running_name(value.name)
        for run in last.batch.runs
        for value in run.plan.values
        if value.role is Role.WEIGHT
    }
    read |= {value.name for value in last.batch.values if value.role is Role.WEIGHT}
    good = read - {_name_of(origin, held_as) for origin in absorbed}
    bad = {_name_of(origin, held_as) for origin in report.origins}
    turned = good & set(_written_since(bad, last.batch.ended, model, standing, writes))
    if not turned:
        return report
    advice = WATCHED if steps.are_watched else NOT_WATCHED
    running = step_that_runs()
    if running is not None:
        rate = running.param_groups[0].get("lr")
        of_rate = "" if rate is None else f": its learning rate is {float(rate):g}"
        advice = IN_STEP.format(class_name(type(running)), of_rate)
    elif not standing.stepped_since(last.batch.ended):
        advice = NO_STEP
    weights = dict(model.named_parameters())

    def with_batch(origin: Origin) -> Origin:
        name = _name_of(origin, held_as)
        if name not in turned:
            return origin
        if is_lent(weights[name]):
            return replace(origin, fixes=(Fix("advice", LENT),))
        by_hand = () if writes is None else writes.of_weight(weights[name])
        text = BY_STEP.format(*spoilt[name]) if name in spoilt else advice
        if text == NO_STEP and by_hand:
            text = BY_HAND.format(told_writes(by_hand), source_at(by_hand[0].place).code)
            if excused is not None and excused.batch_number == last.batch.number:
                text = BY_SCALE.format(told_writes(by_hand), excused.scale, excused.batch_number)
        elif text == NO_STEP and origin.frame.source is not None:
            lines = writes_of_parameters(origin.frame.source.file)
            places, codes = (" and ".join(x.place for x in lines), "; ".join(x.code for x in lines))
            text = IN_LOOP.format(places, codes) if lines else text
        return replace(origin, good_in=last.batch.number, fixes=(Fix("advice", text),))

    return replace(report, origins=tuple(map(with_batch, report.origins)))


def _name_of(origin: Origin, held_as: str) -> str:
    """The model's own name for a weight that is bad; "" of another origin."""
    if origin.role is not Role.WEIGHT:
        return ""
    name = origin.what.removeprefix("weight ")
    return name.removeprefix(f"{held_as}.") if held_as else name


def _with_writers(report: Report, model: Module, held_as: str, writes: LateWrites | None) -> Report:
    """The report on a first call, with the lines that were seen to write bad weights before it."""
    weights = dict(model.named_parameters())

    def with_writer(origin: Origin) -> Origin:
        weight = weights.get(_name_of(origin, held_as))
        by_hand = () if weight is None or writes is None else writes.of_weight(weight)
        if not by_hand:
            return origin
        text = WROTE.format(told_writes(by_hand), source_at(by_hand[0].place).code)
        return replace(origin, fixes=(Fix("advice", text),))

    return replace(report, origins=tuple(map(with_writer, report.origins)))


def _written_since(
    bad: Iterable[str],
    ended: Snapshot,
    model: Module,
    standing: StandingTensors,
    writes: LateWrites | None,
) -> Iterator[str]:
    """The names of bad weights that may have been written since a batch ended."""
    changed = standing.changes_since(ended)
    weights = dict(model.named_parameters())
    for name in bad:
        weight = weights.get(name)  # a write into its `data` is seen only as it happens
        is_written = weight is not None and writes is not None and bool(writes.of_weight(weight))
        if weight is not None and (is_written or changed(weight)):
            yield name
