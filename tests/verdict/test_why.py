"""``Report.why``: what the first origin is in another way, held against torch itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxguard
from fxguard import forgiving
from fxguard.measure import free_memory
from fxguard.report.load import load_report
from fxguard.report.report import Report
from fxguard.testing.watch import as_module
from fxguard.why import _forward, reasons

HALF = torch.float16
AT_MOST = re.compile(r"at most ([\d.e+-]+)")


def report_on(function: Callable[..., Any], *args: Any, **options: Any) -> Report:
    """The first report on one call, and on its backward where it gives a scalar."""
    reports: list[Report] = []
    model = function if isinstance(function, nn.Module) else as_module(function)
    guarded = fxguard.instrument(model, on_detect=reports.append, **options)
    result = guarded(*args)
    if not reports and result.requires_grad:
        result.sum().backward()
    fxguard.remove(model)
    assert reports, "no report"
    return reports[0]


def number_in(line: str) -> float:
    """What an answer says of the largest magnitude."""
    found = AT_MOST.search(line)
    assert found is not None, line
    return float(found[1])


def is_about(number: float, wanted: Tensor) -> bool:
    """Whether three digits of it are those of the largest magnitude of a tensor."""
    return math.isclose(number, float(wanted.detach().abs().max()), rel_tol=6e-3)


def one_of(lines: tuple[str, ...], end: str) -> str:
    """The only answer that ends so."""
    [line] = [line for line in lines if line.endswith(end)]
    return line


# Precision.


def squares(x: Tensor) -> Tensor:
    return (x * x).sum(-1)


def test_a_half_overflow_is_finite_in_float32() -> None:
    """The number is that of the operation in a run in float32."""
    x = torch.tensor([[300.0, 2.0], [500.0, 1.0]], dtype=HALF)
    line = one_of(report_on(squares, x).why, ": precision")
    assert line.startswith("in float32 it is finite (at most ")
    assert is_about(number_in(line), x.float() * x.float())


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float32])
def test_a_pole_is_no_matter_of_precision(dtype: torch.dtype) -> None:
    """The logarithm of 0 is infinite in every dtype."""
    lines = report_on(lambda x: torch.log(x) + 1, torch.tensor([0.0, 1.0], dtype=dtype)).why
    assert one_of(lines, ": not precision").endswith("in float64 it is -inf too: not precision")
    assert not any(line.endswith(": precision") for line in lines)


def test_float32_may_not_suffice() -> None:
    """exp(100) is finite in float64 only: both are said, with the number."""
    x = torch.tensor([100.0, 1.0])
    wanted = f"{float(x.double().exp()[0]):.6g} at [0]"
    assert report_on(torch.exp, x).why == (f"in float64 it is {wanted}: precision",)
    [line] = report_on(torch.exp, x.half()).why
    assert line.startswith("in float32 it is inf too, in float64 2.68")
    assert line.endswith(" at [0]: precision")


def test_autocast_is_precision() -> None:
    """The weights are in float32, and one operation is not."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 100.0)
    x = torch.full((2, 4), 200.0)
    with torch.autocast("cpu", HALF):
        line = one_of(report_on(model, x).why, ": precision")
    assert line.startswith("in float32 ")
    assert is_about(number_in(line), model(x))


def lost_before_a_break(x: Tensor) -> Tensor:
    y = x * x
    torch._dynamo.graph_break()
    return 1 / y


def test_the_other_way_begins_with_the_batch() -> None:
    """A number that a graph before has lost is not lost in float32."""
    x = torch.tensor([1e-4, 1.0], dtype=HALF)
    line = one_of(report_on(lost_before_a_break, x).why, ": precision")
    assert is_about(number_in(line), 1 / (x.float() * x.float()))
    zero = torch.tensor([0.0, 1.0], dtype=HALF)
    one_of(report_on(lost_before_a_break, zero).why, ": not precision")


def test_a_mask_that_is_meant_counts_for_nothing() -> None:
    """What is infinite in both forms on purpose stands beside what overflows."""

    def scores(q: Tensor, mask: Tensor) -> Tensor:
        return (q * 200 + mask).softmax(-1) + (q * 200)

    q = torch.tensor([[1.0, 400.0]], dtype=HALF)
    mask = torch.tensor([[-math.inf, 0.0]], dtype=HALF)
    line = one_of(report_on(scores, q, mask).why, ": precision")
    assert is_about(number_in(line), q.float() * 200)


# The compiler.


def compiling_wrongly(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A compiler that takes an error function for a division by 0."""
    for node in graph_module.graph.nodes:
        if node.target is torch.erf:
            node.target = lambda x: x / 0
    graph_module.recompile()
    return graph_module.forward  # type: ignore[no-any-return]


def error_function(x: Tensor) -> Tensor:
    return torch.erf(x * 600) + 1


def compiled_report(function: Callable[..., Any], backend: Any, *args: Tensor) -> Report:
    reports: list[Report] = []
    inner = fxguard.backend(backend, on_detect=reports.append)
    torch.compile(function, backend=inner)(*args)
    assert reports, "no report"
    return reports[0]


def test_an_operation_that_is_compiled_wrongly_is_the_compiler() -> None:
    """Eager mode makes a finite number of the same inputs, and it is said which."""
    x = torch.tensor([1.0, -2.0])
    report = compiled_report(error_function, compiling_wrongly, x)
    assert report.origins[0].what == "erf"
    [line] = report.why
    assert line.startswith("eager mode makes at most ")
    assert line.endswith(": the compiler")
    assert is_about(number_in(line), torch.erf(x * 600))
    assert f"  why: {line}" in str(report).splitlines()


def test_eager_mode_rounds_as_the_model_does() -> None:
    """The number is that of eager mode in the model's dtype, though float64 runs beside it."""

    def rounded_away(x: Tensor) -> Tensor:
        return torch.erf((x + 3e-4) - x)

    x = torch.ones(2, dtype=HALF)
    [line] = compiled_report(rounded_away, compiling_wrongly, x).why
    assert line == "eager mode makes at most 0: the compiler"


@pytest.mark.parametrize("backend", ["aot_eager", compiling_wrongly])
def test_what_eager_mode_does_too_is_not_the_compiler(backend: Any) -> None:
    """An overflow is in the model, also where another operation is compiled wrongly."""

    def overflows(x: Tensor) -> Tensor:
        return (x * 600) * torch.sigmoid(x)

    x = torch.tensor([200.0, 1.0], dtype=HALF)
    lines = compiled_report(overflows, backend, x).why
    assert "eager mode agrees (inf in mul): not the compiler" in lines


def test_other_random_numbers_are_no_proof_against_a_compiler() -> None:
    """A graph that draws is a proof if the same numbers were drawn, and not if others were."""
    runs = []

    def noisy(x: Tensor) -> Tensor:
        return torch.erf(x * torch.rand_like(x))

    def drawing_anew(graph: GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        compiled = compiling_wrongly(graph, given)

        def run(*args: Any) -> Any:
            runs.append(torch.rand(len(runs)))
            return compiled(*args)

        return run

    report = compiled_report(noisy, compiling_wrongly, torch.ones(4))
    assert report.origins[0].what == "erf"
    [line] = report.why
    assert line.startswith("eager mode makes at most 0.")
    assert line.endswith(": the compiler")
    torch._dynamo.reset()
    report = compiled_report(noisy, drawing_anew, torch.ones(4))
    assert report.origins[0].what == "erf"
    assert len(runs) == 2
    assert report.why == ()


def test_eager_mode_is_not_compared_with_itself() -> None:
    """Without a compiler there is nothing to ask."""
    lines = report_on(squares, torch.tensor([[300.0, 2.0]], dtype=HALF)).why
    assert not any("eager" in line for line in lines)


def test_inductor_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering of Inductor's that is wrong, and one that is right."""
    from torch._functorch import config as of_autograd
    from torch._inductor import config, lowering

    aten = torch.ops.aten
    right = compiled_report(squares, "inductor", torch.tensor([[300.0, 2.0]], dtype=HALF))
    assert "eager mode agrees (inf in mul): not the compiler" in right.why
    torch._dynamo.reset()
    product = lowering.lowerings[aten.mul.Tensor]
    monkeypatch.setitem(lowering.lowerings, aten.erf.default, lambda x: product(x, math.inf))
    x = torch.tensor([1.0, -2.0])
    with config.patch(fx_graph_cache=False), of_autograd.patch(enable_autograd_cache=False):
        [line] = compiled_report(error_function, "inductor", x).why
    assert line.endswith(": the compiler")
    assert is_about(number_in(line), torch.erf(x * 600))


def test_a_backward_that_is_compiled_is_compared_too() -> None:
    """The derivative of a root at 0 is infinite without a compiler, too."""
    lines = compiled_backward(lambda x: x.sqrt().sum(), torch.zeros(3), "aot_eager").why
    assert "eager mode agrees (inf in backward of sqrt): not the compiler" in lines


def test_a_backward_that_is_compiled_wrongly_is_the_compiler() -> None:
    """Eager mode makes finite gradients, and it is said how large."""
    x = torch.tensor([1.0, 2.0])
    line = one_of(compiled_backward(lambda x: x.sin().sum(), x, wrong_cosine()).why, "compiler")
    assert line.startswith("eager mode makes gradients of at most ")
    assert line.endswith(": the compiler")
    assert is_about(number_in(line), x.cos())


def compiled_backward(function: Callable[..., Any], x: Tensor, backend: Any) -> Report:
    """The report on a backward of which the graph is compiled."""
    reports: list[Report] = []
    guarded = fxguard.instrument(as_module(function), on_detect=reports.append)
    torch.compile(guarded, backend=backend)(x.clone().requires_grad_()).backward()
    assert reports, "no report"
    return reports[0]


def wrong_cosine() -> Any:
    """A compiler that makes every cosine of a backward infinite."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph_module: GraphModule, example_inputs: list[Any]) -> Any:
        return make_boxed_func(graph_module.forward)

    def backward(graph_module: GraphModule, example_inputs: list[Any]) -> Any:
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.cos.default:
                node.target = lambda x: x / 0
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


# The loss scale.


class Deep(nn.Module):
    """Layers in float16, of which the gradients are large."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(8) * gain)
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().sum()


def gradients_of(scale: float) -> Report:
    reports: list[Report] = []
    guarded = fxguard.instrument(Deep(3.0), on_detect=reports.append)
    x = torch.full((2, 8), 2.0, dtype=HALF, requires_grad=True)
    (guarded(x) * scale).backward()
    assert reports, "no report"
    return reports[0]


def test_a_gradient_that_is_finite_without_the_scale_is_the_loss_scale() -> None:
    """Its number is the one that a backward of the loss itself has."""
    model = Deep(3.0)
    result = model.layer(torch.full((2, 8), 2.0, dtype=HALF))
    [gradient] = torch.autograd.grad(result.float().sum(), result)
    line = one_of(gradients_of(2.0**17).why, ": the loss scale")
    assert line.startswith("without the loss scale of 131072 it is at most ")
    assert is_about(number_in(line), gradient)


def test_a_pole_is_not_the_loss_scale() -> None:
    """Its gradient is infinite without a scale: of the model's own loss, and of a scaler's."""
    root = as_module(lambda x: x.sqrt().sum())
    wanted = re.compile("without the loss scale of 65536 it is inf(inite)? too: not the loss scale")
    for options, scale in (({}, 65536.0), ({"loss_scale": 65536.0}, 65536.0)):
        reports: list[Report] = []
        guarded = fxguard.instrument(root, on_detect=reports.append, **options)  # type: ignore[arg-type]
        (guarded(torch.zeros(3, requires_grad=True)) * scale).backward()
        fxguard.remove(root)
        assert any(map(wanted.fullmatch, reports[0].why)), reports[0].why


def test_without_a_scale_nobody_speaks_of_one() -> None:
    """A loss that is not scaled has none to leave out."""
    lines = report_on(lambda x: x.sqrt().sum(), torch.zeros(3, requires_grad=True)).why
    assert lines == ("in float64 it is inf too: not precision",)


# The data.


def divided(x: Tensor, n: Tensor) -> Tensor:
    return x / n[:, None]


def test_a_sample_that_fails_alone_is_the_data() -> None:
    """Another in its place leaves what eager torch gives on that batch."""
    x, n = torch.rand(4, 3), torch.tensor([1.0, 2.0, 0.0, 4.0])
    line = one_of(report_on(divided, x, n).why, ": the data")
    assert line.startswith("with sample 0 in the place of sample 2 it is finite")
    others = [0, 1, 0, 3]
    assert is_about(number_in(line), divided(x[others], n[others]))


def test_several_samples_are_replaced_together() -> None:
    """Each that fails, by the first that does not."""
    x, n = torch.rand(6, 3), torch.tensor([0.0, 2.0, 0.0, 4.0, 1.0, 1.0])
    lines = report_on(divided, x, n).why
    assert one_of(lines, ": the data").startswith("with sample 1 in the place of samples 0 and 2 ")
    many = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    line = one_of(report_on(divided, x, many).why, ": the data")
    assert line.startswith("with sample 5 in the place of 5 others, the first is 0, it is finite")


def test_where_all_samples_fail_no_sample_is_the_data() -> None:
    """They are counted."""
    lines = report_on(divided, torch.rand(4, 3), torch.zeros(4)).why
    assert "all 4 samples fail: not one sample's data" in lines


def test_a_place_that_fails_with_any_sample_is_not_the_data() -> None:
    """The second row is too large for what the model multiplies it by."""

    def by_place(x: Tensor) -> Tensor:
        return x * torch.tensor([[1.0], [6e4]], dtype=HALF)

    lines = report_on(by_place, torch.full((2, 3), 2.0, dtype=HALF)).why
    wanted = "with sample 0 in the place of sample 1 it is inf too: not one sample's data"
    assert wanted in lines


def test_without_a_batch_nobody_speaks_of_samples() -> None:
    """One dimension is no batch of samples, and inputs may disagree about it."""
    for args in ((torch.zeros(3),), (torch.zeros(2, 3), torch.zeros(3))):
        lines = report_on(lambda x, y=None: x.log() + (0 if y is None else y), *args).why
        assert not any("sample" in line for line in lines)


def test_an_input_that_is_bad_is_the_data() -> None:
    """With another sample the model returns what it returns of that batch."""
    model, x = nn.Linear(3, 2), torch.rand(4, 3)
    x[1, 2] = math.nan
    [line] = report_on(model, x).why
    assert line.startswith("with sample 0 in the place of sample 1 what left the model is finite")
    assert line.endswith(": the data")
    assert is_about(number_in(line), model(x[[0, 0, 2, 3]]))
    [line] = report_on(model, torch.full((4, 3), math.nan)).why
    assert line.endswith("holds NaN in 12 of 12 elements: the data")


# The weights.


def test_a_weight_that_is_bad_is_the_weights() -> None:
    """Counted in the weight; running statistics likewise."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[0].weight.data[1, 1] = math.nan
    assert report_on(model, torch.rand(3, 4)).why == (
        "weight 0.weight holds NaN in 1 of 16 elements: the weights",
    )
    model[0].weight.data[1, 1] = 1.0
    model[1].running_var[2] = math.nan
    assert report_on(model, torch.rand(3, 4)).why == (
        "buffer 1.running_var holds NaN in 1 of 4 elements: the weights",
    )


def test_a_weight_that_has_grown_is_the_weights() -> None:
    """Both numbers are told, once."""
    model = nn.Linear(4, 4, bias=False)
    reports: list[Report] = []
    guarded = fxguard.instrument(model, on_detect=reports.append)
    x = torch.rand(2, 4)
    guarded(x)
    with torch.no_grad():
        model.weight.fill_(1e38)
    guarded(x * 20)
    line = one_of(reports[0].why, ": the weights")
    assert line.startswith("weight up to 1e+38, it was ")
    assert str(reports[0]).count("up to 1e+38, it was ") == 1


def test_healthy_weights_are_not_accused() -> None:
    """An overflow of activations says nothing of weights."""
    model = nn.Linear(4, 4).half()
    nn.init.constant_(model.weight, 100.0)
    lines = report_on(model, torch.full((2, 4), 400.0, dtype=HALF)).why
    assert lines
    assert not any("weights" in line for line in lines)


# What does not change.


class Stateful(nn.Module):
    """Draws, counts, and overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.drop(self.norm(x)) * 1e30 * 1e30).sum()


def state_after(asks: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    if not asks:
        monkeypatch.setattr(reasons, "why_of", lambda *args: ())
    torch.manual_seed(0)
    model = Stateful()
    reports: list[Report] = []
    hooked: list[Tensor] = []
    guarded = fxguard.instrument(model, on_detect=reports.append)
    x = torch.rand(4, 4, requires_grad=True)
    x.register_hook(hooked.append)
    guarded(x)
    assert bool(reports[0].why) is asks
    assert not hooked
    assert x.grad is None
    return [*model.state_dict().values(), torch.get_rng_state(), torch.rand(3)]


def test_the_model_does_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, random numbers, gradients and hooks are as they are without the question."""
    with_answers = state_after(True, monkeypatch)
    without = state_after(False, monkeypatch)
    assert all(torch.equal(one, two) for one, two in zip(with_answers, without, strict=True))


def test_a_healthy_batch_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs again before something is found."""
    asked: list[Any] = []
    monkeypatch.setattr(reasons, "why_of", lambda *args: asked.append(args))
    fxguard.instrument(as_module(squares))(torch.ones(2, 2))
    assert asked == []


def test_a_question_that_raises_hides_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are answered all the same."""

    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(forgiving, "RAISES", False)
    monkeypatch.setattr(_forward, "in_dtype", broken)
    report = report_on(squares, torch.tensor([[300.0], [300.0]], dtype=HALF))
    assert report.origins[0].what == "mul"
    assert report.why == ("both samples fail: not one sample's data",)


def test_without_memory_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have to be copied does not fit: the report comes without an answer."""
    x = torch.tensor([[300.0], [1.0]], dtype=HALF)
    assert len(report_on(squares, x).why) == 2
    monkeypatch.setattr(free_memory, "SMALL", 0)
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 0)
    report = report_on(squares, x)
    assert report.origins[0].cause == "overflow"
    assert report.why == ()


# What a reader sees.


def test_the_answers_stand_below_their_origin() -> None:
    """In the verdict, and not in the message."""
    report = report_on(squares, torch.tensor([[300.0], [1.0]], dtype=HALF))
    shown = [line.removeprefix("  why: ") for line in report.verdict if line.startswith("  why: ")]
    assert tuple(shown) == report.why
    assert not any(line in report.message or line in report.one_line for line in report.why)
    assert all(line in report.summary for line in report.why)


def test_a_number_is_not_printed_twice() -> None:
    """Where the operands end with it, the verdict says it there alone."""
    report = report_on(torch.exp, torch.tensor([100.0]))
    assert len(report.why) == 1
    assert "why:" not in str(report)
    assert str(report).count("2.6881") == 1


def test_answers_are_kept_in_json(tmp_path: Path) -> None:
    """A report that was written before there were any is read too."""
    report = report_on(squares, torch.tensor([[300.0], [1.0]], dtype=HALF))
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert load_report(path) == report
    data = json.loads(report.to_json())
    del data["why"]
    path.write_text(json.dumps(data))
    assert load_report(path).why == ()
