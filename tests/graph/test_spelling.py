"""An operation written as Python source computes what it computed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor

from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import NotJudged
from fxguard.reproduce._spelling import spelled


def x(*shape: int) -> Tensor:
    return torch.rand(*(shape or (2, 4)), generator=torch.Generator().manual_seed(0)) + 0.5


CASES = {
    "x * y": OneOperation("mul", operator.mul, (x(), x())),
    "-x": OneOperation("neg", operator.neg, (x(),)),
    "x[(0, slice(1, None, None))]": OneOperation(
        "getitem", operator.getitem, (x(), (0, slice(1, None)))
    ),
    "operator.xor": OneOperation("add", operator.iadd, (x(), 2)),
    "x.std()": OneOperation("std", "std", (x(),)),
    "x.mul_(2.0)": OneOperation("mul_", Tensor.mul_, (x(), 2.0)),
    "torch.exp(x)": OneOperation("exp", torch.exp, (x(),)),
    "torch.conv2d": OneOperation("conv2d", F.conv2d, (x(1, 2, 4, 4), x(3, 2, 3, 3), None, 1, 1)),
    "torch.nn.functional.linear": OneOperation("linear", F.linear, (x(), x(3, 4)), {"bias": x(3)}),
    "torch.nn.functional.softmax(input, dim=-1)": OneOperation(
        "softmax", F.softmax, (x(),), {"dim": -1, "dtype": None}
    ),
    "torch.cat([tensors, x], dim=0)": OneOperation("cat", torch.cat, ([x(), x()],), {"dim": 0}),
    "torch.ops.aten.div.Tensor": OneOperation("div", torch.ops.aten.div.Tensor, (x(), x())),
    "dtype=torch.float64": OneOperation("sum", torch.sum, (x(),), {"dtype": torch.float64}),
    'float("-inf")': OneOperation("masked_fill", "masked_fill", (x(), x() > 1, float("-inf"))),
    "made[1]": OneOperation("var_mean", torch.var_mean, (x(),), path=(1,)),
    "x[0] = y": OneOperation("setitem", operator.setitem, (x(), 0, x(4)), written=0),
    "torch.autocast": OneOperation("mm", torch.mm, (x(), x(4, 2)), autocast=torch.bfloat16),
    "torch.special": OneOperation("entr", torch.special.entr, (x(),)),
}


@pytest.mark.parametrize("text", CASES)
def test_the_source_computes_the_same(text: str) -> None:
    """Bit for bit, whoever it was called by."""
    operation = CASES[text]
    made = run(operation)
    assert made.dtype == operation.run().dtype
    assert torch.equal(made, operation.run())


@pytest.mark.parametrize(
    "text", [text for text in CASES if text not in ("operator.xor", "made[1]")]
)
def test_the_source_is_what_people_write(text: str) -> None:
    """Signs, methods, public names."""
    assert text in "\n".join(spelled(CASES[text]).lines)


def test_one_result_is_returned_at_once() -> None:
    """Several have a name first."""
    product = spelled(CASES["x * y"])
    assert product.lines == ("return x * y",)
    both = spelled(OneOperation("var_mean", torch.var_mean, (x(),)), [(0,), (1,)])
    assert both.lines == ("made = torch.var_mean(x)", "return made[0], made[1]")


def run(operation: OneOperation) -> Any:
    """What its source makes of its operands."""
    found = spelled(operation)
    lines = [*found.imports, f"def function({', '.join(found.names)}):"]
    scope: dict[str, Any] = {}
    exec("\n".join([*lines, *(f"    {line}" for line in found.lines)]), scope)
    return scope["function"](*[each.clone() for each in operation.tensors])


def test_one_tensor_that_is_given_twice_has_two_names() -> None:
    """So each can be cut by itself."""
    same = x()
    assert spelled(OneOperation("mul", operator.mul, (same, same))).names == ("x", "y")


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (OneOperation("f", lambda x: x, (x(),)), "cannot be written as a call"),
        (OneOperation("add", torch.add, (x(), object())), "was given a object"),
        (
            OneOperation("normal", "normal_", (x(),), {"generator": torch.Generator()}),
            "was given a Generator",
        ),
    ],
)
def test_what_cannot_be_written_is_said(operation: OneOperation, reason: str) -> None:
    """With what stands in the way."""
    with pytest.raises(NotJudged, match=reason):
        spelled(operation)


def test_a_custom_operation_is_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the module that registers it; without such a module that is said."""
    (tmp_path / "halves_of_ours.py").write_text(
        "import torch\n"
        '@torch.library.custom_op("spelled::halve", mutates_args=())\n'
        "def halve(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import halves_of_ours  # type: ignore[import-not-found]

    operation = OneOperation("halve", torch.ops.spelled.halve.default, (x(),))
    assert "import halves_of_ours" in spelled(operation).imports
    assert torch.equal(run(operation), halves_of_ours.halve(x()))

    here = torch.library.Library("spelled_here", "DEF")
    here.define("twice(Tensor x) -> Tensor")
    here.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(NotJudged, match="spelled_here::twice is a custom operation, and no module"):
        spelled(OneOperation("twice", torch.ops.spelled_here.twice.default, (x(),)))
