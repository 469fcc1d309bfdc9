"""What raises, what does not, and what is blamed, on running models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

import fxguard
from support import zoo
from support.masks import MASK, X, finfo_mask, report_of, set_item, softmax_of

CLEAN = {
    "masked_fill": lambda x: softmax_of(x.masked_fill(MASK, -math.inf)),
    "masked_fill_": lambda x: softmax_of((x + 0).masked_fill_(MASK, float("-inf"))),
    "where": lambda x: softmax_of(torch.where(MASK, -math.inf, x)),
    "full": lambda x: softmax_of(x + torch.full((2, 3), -math.inf).triu(1)),
    "full_like": lambda x: softmax_of(torch.where(MASK, torch.full_like(x, -math.inf), x)),
    "setitem": lambda x: softmax_of(set_item(x)),
    "finfo": lambda x: softmax_of((x + finfo_mask(x)) + finfo_mask(x)),
    "views of a mask": lambda x: softmax_of(
        x + torch.full((3, 2), -math.inf).triu(1).T.reshape(1, 6).view(2, 3).clone()
    ),
    "parts of masks": lambda x: softmax_of(
        torch.cat([torch.full_like(x, -math.inf)[:, :1], x], dim=1)
    ),
    "comparison": lambda x: torch.where(x.masked_fill(MASK, -math.inf) == -math.inf, 0.0, x),
    "maximum of a masked row": lambda x: x.masked_fill(MASK, -math.inf).amax(-1),
    "logsumexp of a masked row": lambda x: x.masked_fill(MASK, -math.inf).logsumexp(-1),
    "expanded mask": lambda x: softmax_of(
        x + torch.tensor([0.0, -math.inf, -math.inf]).expand(2, 3)
    ),
    "mask leaves a module": lambda x: torch.full((2, 3), -math.inf),
    "absorbed log": lambda x: torch.where(x > 1, torch.log(x - 1), x),
    "absorbed division": lambda x: torch.nan_to_num(x / 0),
    "max with -inf": lambda x: torch.maximum(x, torch.tensor(-math.inf)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_intended_infinities_and_absorbed_values_do_not_raise(name: str) -> None:
    """Masks, and bad values that reach no output, are no detections."""
    assert report_of(CLEAN[name], X) is None


FAULTY = {
    "overflow": (lambda x: x * 3e38 * 10, "mul", "inf"),
    "log of zero": (lambda x: torch.log(x - 1), "log", "inf"),
    "0/0": (lambda x: (x - 1) / (x - 1), "div", "nan"),
    "sqrt of a negative": (lambda x: torch.sqrt(-x), "sqrt", "nan"),
    "cast to half": (lambda x: (x * 1e5).half(), "half", "inf"),
    "fully masked row": (
        lambda x: softmax_of(x.masked_fill(torch.ones_like(MASK), -math.inf)),
        "softmax",
        "nan",
    ),
    "inf - inf": (
        lambda x: torch.full_like(x, math.inf) - torch.full_like(x, math.inf),
        "sub",
        "nan",
    ),
    "reduction": (lambda x: (x * 1e38).sum(), "mul", "inf"),
    "norm": (lambda x: (x * 1e30).pow(2).mean(), "pow", "inf"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_blamed_on_their_operation(name: str) -> None:
    """Each fault names its operation and what it made."""
    function, what, problem = FAULTY[name]
    origin = report_of(function, X).origins[0]
    assert (origin.what, origin.problem) == (what, problem)
    assert origin.frame.kind == what


def test_details_of_the_blamed_operation() -> None:
    """Counts, largest finite magnitude and first index are those of the bad tensor."""

    def function(x: Tensor) -> Tensor:
        return torch.log(x - 3) * torch.tensor([1.0, 1.0, -1.0])

    report = report_of(function, X)
    origin = report.origins[0]
    expected = torch.log(X - 3)
    assert origin.what == "log"
    assert origin.numel == 6
    assert origin.nan_count == int(expected.isnan().sum())
    assert origin.neginf_count == int((expected == -math.inf).sum())
    assert origin.posinf_count == 0
    assert origin.largest_finite == pytest.approx(float(torch.log(torch.tensor(3.0))))
    assert origin.first_index == (0, 0)
    assert "2 NaN, 0 +inf, 1 -inf of 6 elements" in str(report)


def test_details_survive_dropout() -> None:
    """The second run of the graph draws the same random numbers as the first."""

    def function(x: Tensor) -> Tensor:
        return F.dropout(x.repeat(50, 50), 0.5, training=True) * 3e38

    torch.manual_seed(0)
    state = torch.get_rng_state()
    report = report_of(function, X)
    torch.set_rng_state(state)
    expected = function(X)
    assert report.origins[0].posinf_count == int(expected.isinf().sum())
    assert report.origins[0].nan_count == int(expected.isnan().sum())


def test_details_are_left_out_where_the_second_run_differs() -> None:
    """Counts of a run with other random numbers are no counts of this one."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.noise(x) * 100)

        def noise(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    drawn: list[Tensor] = []

    def with_other_numbers(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            drawn.append(torch.rand(len(drawn) + 1))  # more at each run
            return graph_module(*args)

        return run

    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Model(), on_detect=reports.append)
    torch.compile(model, backend=with_other_numbers)(X)
    torch.compile(model, backend="eager")(X)
    assert [report.origins[0].what for report in reports] == ["exp", "exp"]
    assert reports[0].origins[0].posinf_count is None
    assert reports[1].origins[0].posinf_count is not None


def test_the_report_draws_no_random_numbers() -> None:
    """A detection leaves the generator where the forward left it."""

    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True) / 0

    torch.manual_seed(0)
    function(X)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert report_of(function, X) is not None
    assert torch.equal(torch.rand(3), expected)


def test_origins_are_listed_in_order_of_execution() -> None:
    """Two independent faults are both found, and a NaN made of an inf names both."""

    def function(x: Tensor) -> Tensor:
        first = x / 0
        second = torch.sqrt(-x)
        return first + second

    assert [o.what for o in report_of(function, X).origins] == ["div", "sqrt"]
    chain = report_of(lambda x: x / 0 - x / 0, X)
    assert [o.what for o in chain.origins] == ["div", "div", "sub"]
    assert chain.frames[-1].kind == "div"


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.campaign)])
def test_a_weight_is_named(value: float) -> None:
    """A weight that holds NaN or inf is the cause, not the operation that reads it."""
    model = zoo.ZOO["bert"].model()
    args, kwargs = zoo.ZOO["bert"].inputs(torch.float32, True)
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=reports.append)
    model(*args, **kwargs)
    assert not reports
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 1] = value
    model(*args, **kwargs)
    origin = reports[0].origins[0]
    assert origin.what == f"weight {name}"
    assert origin.first_index == (3, 1)
    assert origin.frame.name == name.rpartition(".")[0]
    assert origin.row == "weight"
    assert (origin.nan_count, origin.posinf_count) == ((1, 0) if math.isnan(value) else (0, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_input_is_named(value: float) -> None:
    """A model input that holds NaN or +inf is the cause."""
    bad = X.clone()
    bad[1, 2] = value
    origin = report_of(lambda x: x * 2, bad).origins[0]
    assert origin.what == "argument `args[0]` of Function.forward"
    assert origin.first_index == (1, 2)


def test_a_mask_given_as_input_is_no_cause() -> None:
    """-inf alone in an input is a mask."""
    mask = torch.zeros(2, 3).masked_fill(MASK, -math.inf)
    assert report_of(lambda x, m: softmax_of(x + m), X, mask) is None
    assert report_of(lambda x, m: softmax_of(x - m), X, mask).origins[0].what == "softmax"


def test_running_statistics_are_not_taken_for_a_bad_buffer() -> None:
    """BatchNorm writes NaN into its buffers when it is fed NaN; the cause is what fed it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.sqrt(x))

    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Model().train(), on_detect=reports.append)
    model(X)
    assert not reports
    model(-X)
    assert [origin.what for origin in reports[0].origins] == ["sqrt"]
    model.eval()(X)
    assert [origin.what for origin in reports[1].origins] == [
        *["buffer norm.running_mean", "buffer norm.running_var"]
    ]


def test_t5_is_healthy_though_it_takes_the_logarithm_of_zero() -> None:
    """T5's relative position buckets hold log(0), which a cast discards: noted once, not raised."""
    model = fxguard.instrument(zoo.ZOO["t5"].model())
    args, kwargs = zoo.ZOO["t5"].inputs(torch.float32, False)
    for _ in range(3):
        model(*args, **kwargs)
    notes = fxguard.guard_of(model).notes
    assert [note.what for note in notes] == ["log", "log"]  # one in each stack
    assert {note.frame.source.code for note in notes if note.frame.source} == {
        "torch.log(relative_position.float() / max_exact)"
    }


def test_strict_raises_on_absorbed_values() -> None:
    """`strict=True` takes them for detections; the clean twin stays clean."""
    absorbed = CLEAN["absorbed log"]
    assert report_of(absorbed, X, strict=True).origins[0].what == "log"
    assert report_of(absorbed, X + 1, strict=True) is None
    assert report_of(CLEAN["masked_fill"], X, strict=True) is None


@pytest.mark.parametrize(
    ("pattern", "silent"),
    [("*:log", True), (":log", True), ("*", True), ("*:exp", False), ("after", False)],
)
def test_ignore_takes_globs(pattern: str, silent: bool) -> None:
    """An ignored operation is no cause, and what it hands on is not reported."""
    report = report_of(lambda x: torch.log(x - 1) + 1, X, ignore=[pattern])
    assert (report is None) == silent


def test_the_gated_gelu_product_is_blamed() -> None:
    """The case of the specification: T5 in float16, the product between two modules."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=384,
        d_model=256,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_heads=8,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
        initializer_factor=10.0,
    )
    torch.manual_seed(0)
    model = fxguard.instrument(T5ForConditionalGeneration(config).half().train())
    ids = zoo.byte_ids(4, 128)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(input_ids=ids, labels=ids)
    frame = caught.value.report.frames[-1]
    assert frame.title == "encoder.block.0.layer.1.DenseReluDense mul"
    assert frame.source is not None
    assert frame.source.code == "hidden_states = hidden_gelu * hidden_linear"
    assert [row.is_bad for row in frame.rows] == [False, False, True]
    assert len(caught.value.report.frames) == 21
