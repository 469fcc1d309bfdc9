"""Both models as programs: what each makes of A's inputs and weights, in float64 throughout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._arguments import Arguments
from fxguard.comparison._evaluated import with_eps_of
from fxguard.comparison._memory import gives_memory, with_zeros
from fxguard.comparison._recorded import copied, values_of
from fxguard.comparison._runs import ModelRun, unchanged
from fxguard.comparison._sides import Key, standing
from fxguard.forgiving import theirs
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_body import with_wide_dtypes
from fxguard.graph.wide_form import NotJudged, Ran, is_float, widened
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import WideForm

__all__ = ["IN_TWO_DTYPES", "Keep", "Program", "Values", "kept_values", "program_of"]

IN_TWO_DTYPES = "draws random numbers, in two dtypes"
Values = dict[Key, list[list[Tensor]]]  # of each operation, in each turn of a loop
Keep = Callable[[Key, list[Tensor]], None]  # gets what an operation made


@dataclass(slots=True)
class Program:
    """What a model makes in float64."""

    # By the identity of what graphs returned, and of inputs and weights.
    made: dict[int, Tensor] = field(default_factory=dict)
    inexact: list[str] = field(default_factory=list)  # what was not computed in float64, and why

    def of(self, output: Tensor) -> Tensor | None:
        """What an output of the model is in float64; None if no captured graph returned it."""
        made = self.made.get(id(output))
        return None if made is None else widened(made, torch.float64)


class Choosing(WideForm):
    """Runs every operation in float64, those that make integers and booleans too.

    A model in another dtype may choose otherwise at a router or a comparison; here both programs
    choose in float64.

    Args:
        keep: gets what each operation makes; None to keep nothing.
        eps_of: the dtype of which norms have their eps; None for that of the model.
    """

    def __init__(self, keep: Keep | None, eps_of: torch.dtype | None) -> None:
        super().__init__()
        self.keep = keep
        self.eps_of = eps_of
        self.graph = 0
        self.draws: set[str] = set()

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if ran.before is not None:
            self.draws.add(ran.call.kind)
        result = self._result(walk, node, ran, args, kwargs)
        if self.keep is not None:
            values = values_of(result, ran.call, lambda x: walk.others.get(x, walk.env[x]))
            made = [x for x in values if isinstance(x, Tensor)]
            key = self.graph, walk.place(node)
            self.keep(key, copied(made) if ran.call.written else made)
        return result

    def _result(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if gives_memory(ran):
            return widened(with_zeros(ran.result), torch.float64)
        made = [x for x in leaves(ran.result) if isinstance(x, Tensor)]
        chooses = any(not is_float(x) for x in made) and not ran.call.written
        if chooses and ran.before is None and not ran.call.casts:
            try:
                given = with_wide_dtypes(widened((args, kwargs), torch.float64), torch.float64)
                with torch.no_grad(), torch.autocast(made[0].device.type, enabled=False):
                    return widened(ran.run(*given[0], **given[1]), torch.float64)
            except theirs():  # no such kernel: the model's own choice
                self.taken_over[walk.place(node)] = f"no float64 kernel for {ran.call.kind}"
                return ran.result
        return super().follow(walk, node, with_eps_of(ran, self.eps_of), args, kwargs)


def kept_values() -> tuple[Values, Keep]:
    """Somewhere to keep what each operation makes, and what puts it there."""
    values: Values = defaultdict(list)
    return values, lambda key, made: values[key].append(made)


def program_of(
    model: ModelRun,
    known: Arguments | None = None,
    *,
    keep: Keep | None = None,
    moved: Mapping[str, Tensor] = MappingProxyType({}),
) -> Program:
    """Run the graphs of a model in float64.

    Args:
        model: a model that has run.
        known: what A has for what the graphs read; None if the model is A itself.
        keep: gets what each operation makes; None to keep nothing.
        moved: other values for some of its weights, by name.

    Raises:
        NotJudged: when it cannot run again.
    """
    if not all(unchanged(each) for each in model.runs):
        raise NotJudged("an input of a captured graph was written after it had run")
    program = Program()
    eps_of = None if known is None else known.a.dtype
    form = Choosing(keep, eps_of)
    returned: list[list[Any]] = []
    _given(program, model, known)
    for number, kept in enumerate(model.runs):
        form.graph = number
        start = Start(kept.run)
        with start.begun() as low, torch.no_grad():
            second = _second(number, model, known, low, returned, program)
            for position, name in standing(kept.run).items() if moved else ():
                if name in moved:
                    second[position] = moved[name].clone()
            _, made = start.walk(low, form, others=second)
        returned.append(list(made))
        for output, high in zip(kept.outputs, made, strict=True):
            if isinstance(output, Tensor) and isinstance(high, Tensor):
                program.made[id(output)] = high
    program.inexact += dict.fromkeys(form.taken_over.values())
    if known is not None and form.draws and _dtypes(known.a) != _dtypes(model):
        program.inexact.append(f"{min(form.draws)} {IN_TWO_DTYPES}")
    return program


def _second(
    number: int,
    model: ModelRun,
    known: Arguments | None,
    low: Sequence[Any],
    returned: Sequence[Sequence[Any]],
    program: Program,
) -> list[Any]:
    """The arguments of a graph in the second form."""
    args = model.runs[number].run.args
    assert args is not None
    names = standing(model.runs[number].run)
    inputs = {id(x) for x in model.given}
    others = list(args) if known is None else known.of(number, returned)
    found = []
    for position, (x, other, copy) in enumerate(zip(args, others, low, strict=True)):
        if not isinstance(x, Tensor):
            found.append(x)
            continue
        if known is None and id(x) in program.made and id(x) not in inputs:
            other = program.made[id(x)]
        is_known = position in names or id(x) in program.made or id(x) in inputs
        if is_float(x) and not is_known and not _is_number(x):
            program.inexact.append("it was made between graphs")
        if other is x:
            found.append(copy)
        else:  # a copy if the graph may write it
            found.append(other.detach() if copy is x else other.detach().clone())
    return found


def _is_number(x: Tensor) -> bool:
    """Whether TorchDynamo passes a Python number as a tensor, because it was another one before."""
    return x.dim() == 0 and x.dtype == torch.float64 and x.device.type == "cpu"


def _given(program: Program, model: ModelRun, known: Arguments | None) -> None:
    """What a model returns as it was given it, or as it holds it."""
    given = model.given if known is None else known.a.given
    for x, other in zip(model.given, given, strict=False):
        program.made[id(x)] = other.detach()
    for name, x in model.parameters.items():
        value = x if known is None else known.weight(name)
        program.made[id(x)] = (x if value is None else value).detach()


def _dtypes(model: ModelRun) -> set[torch.dtype]:
    read = [x for kept in model.runs for x in kept.run.args or ()]
    return {x.dtype for x in trees.tree_leaves(read) if is_float(x)}
