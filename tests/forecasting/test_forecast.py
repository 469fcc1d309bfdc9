"""What fails in another dtype is listed in one run, and what does not is not."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxguard
from fxguard.errors import FxguardError
from fxguard.forecasting._failure import Failure, failure_of
from fxguard.report.forecast import ForecastRow
from support.masks import Function
from support.needs import needs


def failures(model: nn.Module | Callable[..., Any], *args: Any, **options: Any) -> dict[str, str]:
    """Operation to its problem."""
    model = model if isinstance(model, nn.Module) else Function(model)
    return {row.operation: row.problem for row in fxguard.forecast(model, *args, **options).rows}


def norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def test_the_dtype_may_be_a_name() -> None:
    """As on the command line."""
    model = nn.Linear(2, 2)
    found = [
        fxguard.forecast(model, torch.ones(1, 2), dtype=dtype) for dtype in ("bf16", torch.bfloat16)
    ]
    assert str(found[0]) == str(found[1])
    assert found[0].dtype == "bfloat16"


LARGE = torch.full((2, 4), 400.0)
MASK = torch.tensor([0.0, -65504.0]).half().float()

CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, str]]] = [
    ("overflow", lambda x: x * x, (LARGE,), {"mul": "overflow"}),
    (
        "it goes on until a value fits",
        norm,
        (LARGE,),
        {"pow": "overflow", "mean": "overflow", "add": "overflow"},
    ),
    (
        "two that have nothing to do with each other",
        lambda x: (x * x / 1e4).relu() * 1e4,
        (LARGE,),
        {"mul": "overflow", "mul #2": "overflow"},
    ),
    ("an eps that is 0", lambda x: x + 1e-9, (torch.zeros(4),), {"add": "underflow"}),
    ("a clamp's bound", lambda x: x / x.clamp(min=1e-9), (torch.zeros(4),), {"clamp": "underflow"}),
    ("squares", lambda x: x * x, (torch.full((4,), 1e-5),), {"mul": "underflow"}),
    (
        "roundings before it",
        lambda x: (1 - torch.sigmoid(x)).log(),
        (torch.full((4,), 12.0),),
        {"log": "rounding"},
    ),
    (
        "a mask of the smallest number",
        lambda x, m: x + m,
        (-LARGE[0, :2], MASK),
        {"add": "overflow"},
    ),
    ("in place", lambda x: x.clone().mul_(x), (LARGE,), {"mul_": "overflow"}),
    (
        "a cast in the model",
        lambda x: (x.float() * x.float()).to(x.dtype),
        (LARGE,),
        {"to": "overflow"},
    ),
    ("an input", lambda x: x / 1e3, (torch.full((4,), 1e5),), {"input 0": "overflow"}),
]

WELL: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("an ordinary norm", norm, (torch.linspace(-3, 3, 8)[None],)),
    ("a mask", lambda x: x.masked_fill(x > 0, -math.inf).softmax(-1), (torch.randn(4, 8),)),
    ("a pole", torch.log, (torch.tensor([0.0, 1.0]),)),
    ("a softmax that is nearly one-hot", lambda x: x.softmax(-1), (torch.arange(64.0) * 2,)),
    ("an island of float32", lambda x: norm(x.float()).to(x.dtype), (LARGE,)),
    ("an eps that does nothing", lambda x: x + 1e-9, (torch.ones(4),)),
    ("dropout", lambda x: nn.functional.dropout(x, 0.5), (torch.ones(64),)),
]


@pytest.mark.parametrize(
    ("function", "args", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_fails_in_float16(
    function: Callable[..., Any], args: tuple[Any, ...], wanted: dict[str, str]
) -> None:
    assert failures(function, *args) == wanted


@pytest.mark.parametrize(("function", "args"), [c[1:] for c in WELL], ids=[c[0] for c in WELL])
def test_what_fits_is_not_listed(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    found = fxguard.forecast(Function(function), *args)
    assert found, found
    assert str(found).startswith("in float16 none of ")


def test_bfloat16_holds_what_float16_does_not() -> None:
    assert failures(norm, LARGE, dtype=torch.bfloat16) == {}


def test_an_operation_may_fail_inside() -> None:
    """Its result would fit, but the kernel keeps a larger number on the way to it."""
    failure = failure_of(torch.tensor([math.inf, 1.0]).half(), torch.tensor([9.0, 1.0]).double())
    assert failure == Failure("overflow", "float16", 9.0, 0.5, math.inf)
    row = ForecastRow("f", "overflow", "float16", 9.0, 0.5, math.inf)
    assert str(row) == "f: overflow, inside the operation: the result, 9, would fit"


def test_an_error_beyond_what_roundings_explain() -> None:
    wide = torch.linspace(0, 1, 9, dtype=torch.float64)
    assert failure_of(wide.half(), wide) is None
    failure = failure_of((wide * 1.1).half(), wide)
    assert failure is not None
    assert failure.problem == "rounding"
    assert failure.error == pytest.approx(0.1, rel=0.01)


def test_what_is_needed_is_what_float64_gives() -> None:
    """The number is that of the operation on what it was given, and the line is the user's."""
    (row,) = fxguard.forecast(Function(lambda x: x * x), LARGE).rows
    assert row.needed == 160000.0
    assert row.share == 1.0
    assert row.source is not None
    assert row.source.file.endswith("test_forecast.py")
    assert str(row).endswith("overflow, needs 160000, float16 holds 65504")


class Net(nn.Module):
    """A batch norm that counts, a dropout that draws, and a layer that overflows in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)
        nn.init.constant_(self.up.weight, 200.0)
        nn.init.constant_(self.down.weight, 200.0)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(x), 0.1, self.training)
        return torch.as_tensor(self.down(self.up(x).relu()).tanh())


@pytest.mark.parametrize("guarded", [False, True])
def test_the_model_stays_as_it_was(guarded: bool) -> None:
    """Its weights, buffers, mode, gradients, random state and guard."""
    torch.manual_seed(0)
    model = Net().train()
    if guarded:
        fxguard.instrument(model)
    before, x = copy.deepcopy(model.state_dict()), torch.randn(8, 4)
    given, random = x.clone(), torch.get_rng_state()
    assert failures(model, x) == {"down linear": "overflow"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert model.training
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    if guarded:
        assert fxguard.guard_of(model).batch_number == 0


def test_a_value_goes_on_into_the_next_graph() -> None:
    """What the first graph makes too large is as large for the second, which brings it back."""

    def broken(x: Tensor) -> Tensor:
        x = x * x
        torch._dynamo.graph_break()
        return (x / 1e5).exp()

    found = fxguard.forecast(Function(broken), LARGE)
    assert {row.operation: row.problem for row in found.rows} == {"mul": "overflow"}
    assert found.operations == 3


def test_a_buffer_that_was_written_is_no_rounding() -> None:
    """The second graph reads what the first has made of it, and not what the user gave."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            torch._dynamo.graph_break()
            return torch.as_tensor(self.norm(x * 2))

    assert failures(Twice().train(), torch.randn(8, 4) + 3) == {}


def test_weights_that_the_dtype_does_not_hold() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1e5)
    assert failures(model, torch.full((2, 4), 1e-3)) == {"weight": "overflow"}
    nn.init.constant_(model.weight, 1e-9)
    assert failures(model, torch.ones(2, 4))["weight"] == "underflow"


def test_weights_and_inputs_are_no_operations() -> None:
    """The headline counts them by themselves: never more operations fail than there are."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1e5)
    headline = str(fxguard.forecast(model, torch.full((2, 4), 1e-3))).splitlines()[0]
    assert headline == "in float16 none of 1 operation fails; 1 weight or input fails"
    headline = str(fxguard.forecast(model, torch.full((2, 4), 1e5))).splitlines()[0]
    assert headline == "in float16 1 of 1 operation fails; 2 weights or inputs fail"


def test_turns_of_a_loop_have_numbers() -> None:
    """TorchDynamo unrolls it; the turn that is too large is named."""

    def loop(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * 30
        return x

    rows = fxguard.forecast(Function(loop), torch.full((4,), 10.0)).rows
    assert [(row.operation, row.needed) for row in rows] == [("mul #3", 270000.0)]


def test_operations_between_graphs_are_counted() -> None:
    @torch.compiler.disable
    def in_python(x: Tensor) -> Tensor:
        return x * x

    found = fxguard.forecast(Function(lambda x: in_python(x + 1) / 1e5), torch.ones(2))
    assert found
    assert (found.operations, found.between) == (2, 1)
    first, second = str(found).splitlines()
    assert first == "in float16 none of 2 operations fails; not looked at: 1 between graphs"
    assert second.startswith("float16 changes the output by 0.0")


def test_an_operation_without_a_float64_form_is_not_judged() -> None:
    @torch.library.custom_op("fxguard_tests::double_it", mutates_args=())
    def double_it(x: Tensor) -> Tensor:
        return x * 2

    @double_it.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    found = fxguard.forecast(Function(lambda x: double_it(x) * x), LARGE)
    assert [row.operation for row in found.rows] == ["mul"]
    ((operation, reason),) = found.not_judged
    assert operation.endswith("double_it")
    assert "no float64 kernel" in reason
    assert "not judged: 1 without a float64 form" in str(found)


def test_a_graph_that_has_no_second_form_is_not_judged() -> None:
    """An operation without a float64 kernel that writes: nobody knows what others would read."""

    @torch.library.custom_op("fxguard_tests::double_in_place", mutates_args=("x",))
    def double_in_place(x: Tensor) -> None:
        x.mul_(2)

    def writes(x: Tensor) -> Tensor:
        x = x * x
        double_in_place(x)
        return x + 1

    found = fxguard.forecast(Function(writes), LARGE)
    assert not found.rows
    assert len(found.not_judged) == found.operations == 3
    assert "not judged: 3 without" in str(found)


def test_t5_overflows_where_it_is_known_to() -> None:
    """transformers#9295: the feed-forward's second projection, and the residuals it is added to."""
    transformers = needs("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2
    )
    model = transformers.T5EncoderModel(config).eval()
    ids = torch.arange(16)[None]
    assert failures(model, ids) == {}
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    with torch.no_grad():
        feed_forward.wi.weight.fill_(10.0)
        feed_forward.wo.weight.mul_(1e4)
    found = fxguard.forecast(model, ids)
    name = "encoder.block.0.layer.1.DenseReluDense"
    assert any(row.operation == f"{name}.wo linear" for row in found.rows)
    assert all(row.problem == "overflow" for row in found.rows)


@settings(max_examples=15, deadline=None, database=None)
@given(st.floats(-2, 8), st.integers(0, 2**16))
def test_it_lists_what_float64_says(bits: float, seed: int) -> None:
    """A linear layer is listed exactly where its largest result does not fit."""
    torch.manual_seed(seed)
    model = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8) * 2.0**bits * 16
    low = copy.deepcopy(model).half()
    largest = nn.functional.linear(x.half().double(), low.weight.double()).abs().max().item()
    assert bool(failures(model, x)) == (largest >= 65520)


def test_it_is_a_table_and_json() -> None:
    found = fxguard.forecast(Function(norm), LARGE)
    assert found.to_table().count("\n") == 1 + len(found.rows)
    data = json.loads(found.to_json())
    assert [row["problem"] for row in data["rows"]] == ["overflow"] * 3
    assert data["dtype"] == "float16"


def test_frames_have_the_ranges_of_float64(tmp_path: Path) -> None:
    """What float16 does not hold stands on the page as it is, beyond float16's line."""
    found = fxguard.forecast(
        Function(lambda x: x * x / 1000), LARGE, loss=lambda y: y.float().sum()
    )
    assert [frame.title for frame in found.frames] == ["mul", "div", "div (backward)"]
    ranges = {row.label: (row.abs_max, row.dtype) for row in found.frames[0].rows}
    assert ranges["input[0]"] == (400.0, "float16")
    assert ranges["output"] == (160000.0, "float16")
    backward = {row.label: row.abs_max for row in found.frames[2].rows}
    assert backward == {"grad of output": 1.0, "grad of input[0]": 0.001}

    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "in float16 1 of 2 operations fails" in page
    assert "overflow: needs 160000, float16 holds 65504" in page
    (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    sheet = json.loads(data)["sheets"][0]
    assert sheet["marked"] == [0]
    assert sheet["headroom"][0] == -1.3  # it would have to halve as often
    assert "frames" not in json.loads(found.to_json())


def test_a_long_list_is_cut_on_the_terminal() -> None:
    def many(x: Tensor) -> list[Tensor]:
        return [x * (400 + i) for i in range(30)]

    found = fxguard.forecast(Function(many), LARGE)
    assert len(found.rows) == 30
    assert str(found).endswith("  and 10 more")
    assert found.rows[0].operation == "mul #30"  # the worst first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fnuz, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FxguardError, match=r"forecast takes torch.float16, torch.bfloat16, "):
        fxguard.forecast(Net(), torch.randn(2, 4), dtype=dtype)


def test_a_model_that_does_not_run_in_the_dtype_says_so() -> None:
    def ctc(x: Tensor) -> Tensor:
        lengths = torch.full((1,), 4), torch.full((1,), 2)
        return nn.functional.ctc_loss(x, torch.ones(1, 2, dtype=torch.long), *lengths)

    with pytest.raises(FxguardError, match=r"Function does not run in float16: .*ctc_loss"):
        fxguard.forecast(Function(ctc), torch.randn(4, 1, 3).log_softmax(-1))


def test_there_has_to_be_an_operation() -> None:
    with pytest.raises(FxguardError, match="there is nothing to forecast"):
        fxguard.forecast(nn.Identity(), torch.ones(2))


def test_what_is_no_model() -> None:
    """A function, for one, is refused by its type."""
    with pytest.raises(FxguardError, match=r"forecast needs a torch\.nn\.Module, got function"):
        fxguard.forecast(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
