"""PyTorch's own database of operators, modules and higher-order operations as a campaign.

Every sample runs plain and guarded (``operator_trials``): outputs, gradients, random state and
exceptions are compared with those of torch, healthy numbers must give no alarm, ranges are those of
the plain output, a NaN in an argument is blamed on the argument, an overflow on the operation.

CI runs a sample. ``./dev campaign -k operator_database`` runs all of it, and more words a part:
``-k "op_db and default and float32 and 3-of"``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxguard.measure import eager, traceable
from fxguard.measure.ways import EAGER, WAYS
from support.operator_trials import (
    Operation,
    Result,
    Subject,
    operations,
    try_operation,
    try_subject,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what is deprecated

# The database, the mode, the dtype, how many samples of each operation, and in how many parts.
RUNS = [
    ("op_db", "default", torch.float32, 4, 40),
    *(("op_db", mode, torch.float32, 1, 10) for mode in ("python", "replay", "aot_eager")),
    *(
        ("op_db", "default", dtype, 1, 10)
        for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.float64)
    ),
    ("module_db", "default", torch.float32, 2, 4),
    *(("module_db", mode, torch.float32, 1, 2) for mode in ("python", "replay", "aot_eager")),
    *(("hop_db", mode, torch.float32, 4, 1) for mode in ("default", "replay", "aot_eager")),
]
PARTS = [
    pytest.param(*run, part, id=f"{run[0]}-{run[1]}-{str(run[2])[6:]}-{part + 1}-of-{run[4]}")
    for run in RUNS
    for part in range(run[4])
]

IN_CI = {
    ("op_db", "default", torch.float32): """
        add cat cumsum div.no_rounding_mode einsum exp index_put linalg.svd log masked_fill mul
        nn.functional.batch_norm nn.functional.conv2d nn.functional.dropout nn.functional.linear
        nn.functional.scaled_dot_product_attention softmax std to where
        """,
    ("op_db", "default", torch.float16): "addmm pow nn.functional.layer_norm",
    ("op_db", "default", torch.complex64): "fft.fft mul",
    ("op_db", "python", torch.float32): "exp nn.functional.softmin matmul",
    ("op_db", "replay", torch.float32): "exp nn.functional.softmin matmul",
    ("op_db", "aot_eager", torch.float32): "exp nn.functional.softmin matmul",
    ("module_db", "default", torch.float32): "nn.BatchNorm2d nn.GRU nn.MultiheadAttention",
    ("hop_db", "default", torch.float32): "cond.simple scan.simple",
}

Record = Callable[[str, object], None]


def try_all(chosen: list[Operation], mode: str, dtype: torch.dtype, limit: int) -> Result:
    """What came of these operations together."""
    total = Result()
    for operation in chosen:
        total.add(try_operation(operation, mode, dtype, limit))
    return total


def note(record: Record, title: str, result: Result) -> None:
    """For the summary at the end of the run."""
    apart = {reason: sorted(names) for reason, names in result.apart.items()}
    record("operator database", (title, dict(result.counts), apart))


@pytest.mark.campaign
@pytest.mark.parametrize(("database", "mode", "dtype", "limit", "parts", "part"), PARTS)
def test_the_database(
    database: str,
    mode: str,
    dtype: torch.dtype,
    limit: int,
    parts: int,
    part: int,
    record_property: Record,
) -> None:
    """A guarded operation does what torch does, and is blamed for what it did, each of them."""
    chosen = [one for one in operations(database) if dtype in one.dtypes][part::parts]
    result = try_all(chosen, mode, dtype, limit)
    note(record_property, f"{database} {mode} {str(dtype)[6:]}", result)
    assert result.counts["compared"]
    assert not result.wrong, "\n".join(result.wrong)


@pytest.mark.slow
def test_a_sample_of_the_database(record_property: Record) -> None:
    """The same for some operations, in each mode; nothing that is tried comes out empty."""
    total = Result()
    for (database, mode, dtype), names in IN_CI.items():
        wanted = set(names.split())
        chosen = [one for one in operations(database) if one.name in wanted]
        assert {one.name for one in chosen} == wanted
        result = try_all(chosen, mode, dtype, 1)
        note(record_property, f"{database} {mode} {str(dtype)[6:]}", result)
        total.add(result)
    assert not total.wrong, "\n".join(total.wrong)
    assert total.counts["exceptions"] >= 2
    for what in ("compared gradients", "healthy samples", "ranges"):
        assert total.counts[what] >= 10, what
    for what in ("scaled samples", "planted NaN", "overflows blamed on the operation"):
        assert total.counts[what] >= 10, what
    assert total.counts["counts of bad elements"] >= 5


# The trials can fail: without what they look for, each of them does.


class Changing:
    """Makes a model of each function in turn: the plain one, the guarded one, and TorchDynamo's."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        self.functions = itertools.chain(functions, itertools.repeat(functions[-1]))

    def __call__(self) -> nn.Module:
        function = next(self.functions)

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)

        return Model()


def refuses(x: Tensor) -> Tensor:
    raise KeyError("no")


def not_measured(value: Tensor) -> Tensor:
    return traceable.mark(traceable.NO_DATA, value.device)


def measured_wrong(value: Tensor, measure: Any = eager.abs_min_max) -> Tensor:
    return measure(value * 2)


def inf_from_three(value: Tensor, measure: Any = eager.abs_min_max) -> Tensor:
    return measure(value.detach().masked_fill(value.detach() > 3, torch.inf))


X = torch.linspace(0.5, 2, 6)
TWICE = (torch.exp, torch.exp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("functions", "measure", "mistake"),
    [
        ((torch.exp, torch.exp2, torch.exp), None, "other bits"),
        ((torch.exp, refuses, torch.exp), None, r"differs: None / KeyError\('no'\)"),
        ((refuses, torch.exp, refuses), None, r"differs: KeyError\('no'\) / None"),
        (TWICE, inf_from_three, "false alarm: "),
        (TWICE, measured_wrong, "ranges .* instead of "),
        (TWICE, not_measured, "a planted NaN is not reported"),
        (TWICE, not_measured, "times its numbers, and not reported"),
    ],
)
def test_a_trial_finds_what_it_looks_for(
    functions: Any, measure: Any, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guarded model that differs, raises, is measured wrong or not at all is a mistake."""
    if measure is not None:
        monkeypatch.setitem(WAYS, "eager", replace(EAGER, abs_min_max=measure, in_memory=None))
    result = Result()
    try_subject("exp", Subject(Changing(*functions), (X,), {}), "default", result)
    assert [wrong for wrong in result.wrong if re.search(mistake, wrong)], result.wrong


@pytest.mark.slow
def test_a_trial_of_what_works_finds_nothing() -> None:
    """The clean twin."""
    result = Result()
    try_subject("exp", Subject(Changing(*TWICE), (X,), {}), "default", result)
    assert not result.wrong
    assert result.counts == {
        "samples": 1,
        "compared": 1,
        "healthy samples": 1,
        "ranges": 1,
        "scaled samples": 2,
        "planted NaN": 1,
        "overflows": 1,
        "overflows blamed on the operation": 1,
        "counts of bad elements": 1,
        "compared gradients": 0,
        "exceptions": 0,
    }
