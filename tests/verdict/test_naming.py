"""What a report calls what was bad before any operation ran: arguments, weights, other tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxguard


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    ids: Tensor


class Model(nn.Module):
    """Adds up every tensor that it is given."""

    def forward(
        self, x: Any, *rest: Any, mask: Any = None, pair: Any = None, **others: Any
    ) -> Tensor:
        total = x["a"][0] if isinstance(x, dict) else x.ids if isinstance(x, Batch) else x
        for item in rest:
            total = total + item
        if mask is not None:
            total = total + mask
        if pair is not None:
            total = total + pair.second
        for item in others.values():
            total = total + item
        return total * 1


def with_nan(*shape: int, at: Any = ()) -> Tensor:
    x = torch.ones(shape)
    x[at] = math.nan
    return x


GOOD, ONE = torch.ones(8, 2), with_nan(8, 2, at=(5, 1))
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "x": ((ONE,), {}),
    "x['a'][0]": (({"a": [ONE]},), {}),
    "x.ids": ((Batch(ONE),), {}),
    "rest[1]": ((GOOD, GOOD, ONE), {}),
    "mask": ((GOOD,), {"mask": ONE}),
    "pair.second": ((GOOD,), {"pair": Pair(GOOD, ONE)}),
    "others['bias']": ((), {"x": GOOD, "bias": ONE}),
}


def report_of(model: nn.Module, *args: Any, **kwargs: Any) -> fxguard.types.Report:
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=reports.append)(*args, **kwargs)
    return reports[0]


@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_an_argument_is_named_as_the_signature_names_it(name: str, stance: str) -> None:
    """In a graph and between graphs, given by position or keyword, alone or in a container."""
    args, kwargs = CALLS[name]
    with torch.compiler.set_stance(stance):
        report = report_of(Model(), *args, **kwargs)
    assert report.message == f"batch 0: argument `{name}` of Model.forward: 1 NaN, in row 5"
    assert report.advice == report.one_line  # no line of the model is to be looked at


@pytest.mark.parametrize("call", [nn.Module.__call__, nn.Linear.forward])
def test_the_input_of_a_module_of_torch_has_the_name_in_its_documentation(
    call: Callable[..., Any],
) -> None:
    """`torch.nn.Linear` calls it `input`."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(nn.Linear(2, 2), on_detect=reports.append)
    call(model, ONE) if call is nn.Module.__call__ else model.forward(ONE)
    assert reports[0].message == "batch 0: argument `input` of Linear.forward: 1 NaN, in row 5"


def test_an_argument_that_is_written_in_place_keeps_its_name() -> None:
    """The report has the numbers of before, of a copy."""

    class Writes(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image.add_(1) * 2

    message = report_of(Writes(), ONE.clone()).message
    assert message == "batch 0: argument `image` of Writes.forward: 1 NaN, in row 5"


WHERE = {
    "1 NaN, in row 0": with_nan(2, 3, at=(0, 1)),
    "2 NaN, in rows 0 and 2, all in column 1": with_nan(3, 3, at=([0, 2], [1, 1])),
    "3 NaN, in rows 0, 1 and 3, all in column 0": with_nan(4, 2, at=([0, 1, 3], 0)),
    "5 NaN, in 5 rows, the first is 1, all in column 0": with_nan(6, 2, at=(slice(1, None), 0)),
    "6 NaN, every element": with_nan(2, 3),
    "1 NaN, at [4]": with_nan(6, at=(4,)),
    "2 NaN, first at [4]": with_nan(6, at=(slice(4, None),)),
    "1 NaN": with_nan(),
    "1 NaN, 1 +inf, in rows 0 and 1": torch.tensor([[math.nan, 1.0], [1.0, math.inf]]),
}


@pytest.mark.parametrize("words", WHERE)
def test_an_argument_says_how_much_of_it_is_bad_and_where(words: str) -> None:
    """Rows where there are few, else the first; the whole tensor where all of it is."""
    message = report_of(Model(), WHERE[words]).message
    assert message == f"batch 0: argument `x` of Model.forward: {words}"


ELSEWHERE = with_nan(2, at=(1,))


class ReadsOthers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = with_nan(2, at=(0,))  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + ELSEWHERE


def test_other_tensors_have_the_name_that_the_code_gives_them() -> None:
    """An attribute, a global; nothing of TorchDynamo's names."""
    found = report_of(ReadsOthers(), torch.ones(2)).origins
    assert {origin.what for origin in found} == {"input `self.scale`", "input `ELSEWHERE`"}
    reports: list[fxguard.types.Report] = []
    backend = fxguard.backend("eager", on_detect=reports.append)
    torch.compile(nn.Linear(2, 2), backend=backend)(ONE)
    assert reports[0].message == "batch 0: input[0]: 1 NaN, in row 5"


def test_a_bad_weight_points_at_no_line() -> None:
    """The line that read it has nothing to do with it."""
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    report = report_of(model, GOOD)
    assert report.message == "batch 0: weight 0.weight holds NaN"
    assert report.advice == report.one_line


def stack(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count)])


def test_many_bad_weights_are_one_sentence() -> None:
    """With their count, and that of all; buffers have a sentence of their own."""
    model = stack(20).eval()
    with torch.no_grad():
        for block in model:
            block[0].weight.fill_(math.nan)  # type: ignore[index]
        model[3][1].running_mean.fill_(math.nan)  # type: ignore[index]
        model[4][1].running_mean.fill_(math.nan)  # type: ignore[index]
    report = report_of(model, torch.ones(3, 4))
    weights = "20 of 80 weights hold NaN: 0.0.weight, 1.0.weight, 2.0.weight and 17 more"
    buffers = "2 of 60 buffers hold NaN: 3.1.running_mean, 4.1.running_mean"
    assert report.message == f"batch 0: {weights}"
    assert [line for line in report.verdict if line[0] != " "] == [weights, buffers]
    assert len(report.verdict) <= 12
    assert len(report.origins) == 22  # data lacks nothing


def test_a_model_whose_weights_are_all_bad_has_a_short_verdict() -> None:
    """The clean twin counts nothing."""
    model = stack(20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    verdict = report_of(model, torch.ones(3, 4)).verdict
    assert verdict[0].startswith("all 80 weights hold NaN: 0.0.weight, 0.0.bias, ")
    assert len(verdict) <= 12
    found: list[fxguard.types.Report] = []
    fxguard.instrument(stack(20), on_detect=found.append)(torch.ones(3, 4))
    assert not found


def test_operations_of_a_module_of_torch_have_the_line_that_called_it() -> None:
    """`torch.nn.CrossEntropyLoss()(x, y)` has no line of the user's inside: it is this one."""
    loss = fxguard.instrument(nn.CrossEntropyLoss(), on_detect=(reports := []).append)
    loss(torch.randn(2, 3), torch.full((2,), -100))  # nothing to average: 0 / 0
    line = sys._getframe().f_lineno - 1
    [origin] = reports[0].origins
    source = origin.frame.source
    assert source is not None
    assert (source.file, source.line) == (__file__, line)
    assert source.code.startswith("loss(torch.randn(2, 3)")
    assert f"test_naming.py:{line}" in reports[0].message


@pytest.mark.parametrize("direct", [False, True])
def test_a_root_that_is_one_operation_has_one_frame(direct: bool) -> None:
    """Called as a module or through `forward`: with the module's name and its weights."""
    model = fxguard.instrument(nn.Linear(2, 2))
    model.forward(GOOD) if direct else model(GOOD)
    [frame] = fxguard.guard_of(model).frames()
    assert frame.title == "Linear"
    assert [row.label for row in frame.rows] == ["weight", "bias", "input[0]", "output"]


@pytest.mark.parametrize(
    ("positives", "problem", "said"),
    [
        ([0.0, 2.0], "inf", "buffer pos_weight was computed: a division by zero gives inf;"),
        ([0.0, 4.0], "nan", "initialise buffer pos_weight: the checkpoint may lack it,"),
    ],
)
def test_a_buffer_that_holds_inf_was_computed(
    positives: list[float], problem: str, said: str
) -> None:
    """The script divided by a count of 0; NaN may as well be memory that nobody wrote."""
    counts = torch.tensor(positives)
    weights = (4 - counts) / counts
    if problem == "nan":
        weights[0] = float("nan")
    criterion = fxguard.instrument(nn.BCEWithLogitsLoss(pos_weight=weights))
    with pytest.raises(fxguard.NonFiniteError) as raised:
        criterion(torch.zeros(3, 2), torch.ones(3, 2))
    report = raised.value.report
    assert report.origins[0].message == "buffer pos_weight holds " + (
        "NaN" if problem == "nan" else "inf"
    )
    assert said in report.fix
    healthy = fxguard.instrument(nn.BCEWithLogitsLoss(pos_weight=(4 - counts) / (counts + 1)))
    assert healthy(torch.zeros(3, 2), torch.ones(3, 2)).isfinite()
