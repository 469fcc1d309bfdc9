"""fxguard composes with torch.compile, autocast, no_grad, deepcopy and generate."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxguard
from support import zoo
from support.same_results import assert_same, results


class Overflow(nn.Module):
    """Healthy for small inputs; the product of two finite numbers overflows for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(4))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        product = hidden * hidden
        return product.sum(dim=-1)


BAD = 3e30
FULLGRAPH = [
    *("bert", "cnn", "twice", "containers"),
    *(pytest.param(name, marks=pytest.mark.campaign) for name in ("t5", "llama", "whisper", "vit")),
]


@pytest.mark.parametrize("name", FULLGRAPH)
def test_fullgraph_training_keeps_every_bit(name: str) -> None:
    """`torch.compile(instrument(model), fullgraph=True)` trains, in one graph, to the same bits."""
    entry = zoo.ZOO[name]
    inputs = entry.inputs(torch.float32, False)
    plain = torch.compile(entry.model(train=True), backend="eager", fullgraph=True)
    expected = results(plain, inputs, train=True)
    torch._dynamo.reset()
    model = fxguard.instrument(entry.model(train=True))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(expected, results(compiled, inputs, train=True))
    assert "in 1 graph" in fxguard.guard_of(compiled).coverage()
    assert "between" not in fxguard.guard_of(compiled).coverage()


def test_fullgraph_still_refuses_graph_breaks() -> None:
    """The user's `fullgraph=True` is passed on: a break is an error with and without fxguard."""

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum().item() > 0:
                return x + 1
            return x - 1

    model = fxguard.instrument(Breaks())
    x = torch.ones(2)
    assert torch.equal(torch.compile(model, backend="eager")(x), x + 1)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(model, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}, {"dynamic": True}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_blamed_at_the_right_line(
    backend: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside compiled code the operation is named with its line; the clean batch passes."""
    model = torch.compile(fxguard.instrument(Overflow()), backend=backend, **options)
    model(torch.ones(2, 4)).sum().backward()
    assert capsys.readouterr().out == ""
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(torch.full((2, 4), BAD))
    origin = caught.value.report.origins[0]
    assert origin.frame.kind == "mul"
    assert origin.frame.source is not None
    assert origin.frame.source.code == "product = hidden * hidden"
    assert origin.posinf_count == origin.numel == 8
    assert "\nDetected inf/nan during batch_number=1\n" in capsys.readouterr().err


@pytest.mark.slow
def test_inductor_is_blamed_at_the_right_line() -> None:
    """Inductor fuses the product away; its line is still named."""
    model = torch.compile(fxguard.instrument(Overflow()), fullgraph=True)
    model(torch.ones(2, 4))
    with pytest.raises(fxguard.NonFiniteError, match=r"mul made inf \(test_compile.py"):
        model(torch.full((2, 4), BAD))


@pytest.mark.slow
def test_inductor_with_dynamic_shapes_trains() -> None:
    """Under Inductor with dynamic shapes each size is checked, gradients included."""
    model = torch.compile(fxguard.instrument(Overflow()), dynamic=True)
    for size in (2, 3, 5):
        model(torch.ones(size, 4)).sum().backward()
    with pytest.raises(fxguard.NonFiniteError):
        model(torch.full((7, 4), BAD))


def test_dynamic_shapes_are_one_graph() -> None:
    """`dynamic=True` is passed on: three sizes are one graph."""
    model = fxguard.instrument(Overflow())
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for size in (2, 3, 5):
        compiled(torch.ones(size, 4))
    assert "in 1 graph" in fxguard.guard_of(model).coverage()


def test_an_instrumented_module_inside_a_compiled_parent() -> None:
    """The parent's compiler compiles the guarded part too, and the part is checked."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Overflow()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 0) * 2

    seen = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append([node.name for node in graph_module.graph.nodes])
        return graph_module.forward

    parent = Parent()
    expected = torch.compile(copy.deepcopy(parent), backend="eager")(torch.ones(2, 4))
    fxguard.instrument(parent.inner)
    compiled = torch.compile(parent, backend=backend)
    assert torch.equal(compiled(torch.ones(2, 4)), expected)
    assert any("abs_min_max" in nodes for nodes in seen)
    with pytest.raises(fxguard.NonFiniteError):
        compiled(torch.full((2, 4), BAD))


@pytest.mark.parametrize(
    "name", ["cnn", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("bert", "llama"))]
)
def test_the_backend_alone_checks_too(name: str) -> None:
    """`torch.compile(model, backend=fxguard.backend(...))` keeps every bit and has all frames."""
    entry = zoo.ZOO[name]
    inputs = entry.inputs(torch.float32, False)
    plain = torch.compile(entry.model(train=True), backend="aot_eager")
    expected = results(plain, inputs, train=True)
    torch._dynamo.reset()
    checking = fxguard.backend("aot_eager")
    model = torch.compile(entry.model(train=True), backend=checking)
    assert_same(expected, results(model, inputs, train=True))
    assert "not checked" not in checking.coverage()
    guarded = fxguard.instrument(entry.model(train=True))
    torch._dynamo.reset()
    results(guarded, inputs, train=True)
    expected_titles = [f.title for f in fxguard.guard_of(guarded).frames() if f.is_op]
    assert [f.title for f in checking.frames() if f.is_op] == expected_titles


@pytest.mark.parametrize("backend", ["fxguard", None])
def test_the_backend_raises(backend: str | None) -> None:
    """Both the registered name and the function raise with the operation's line."""
    chosen = backend or fxguard.backend("eager", max_frames_to_save=1)
    model = torch.compile(Overflow(), backend=chosen)
    model(torch.ones(2, 4))
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(torch.full((2, 4), BAD))
    assert caught.value.report.origins[0].what == "mul"
    assert caught.value.report.frames[-1].kind == "mul"
    model(torch.ones(2, 4))


def test_the_backend_counts_batches_and_stops() -> None:
    """Each run of the first graph is a batch; the batch after the last one does not begin."""
    checking = fxguard.backend("eager", abort_after_batch_num=2)
    model = torch.compile(Overflow(), backend=checking)
    for _ in range(3):
        model(torch.ones(2, 4))
    with pytest.raises(fxguard.BatchLimitReached, match="batch 2 has finished"):
        model(torch.ones(2, 4))


def test_the_backend_stops_no_batch_in_the_middle() -> None:
    """With graph breaks, everything of the last batch runs, and nothing of the next one."""
    ran: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        ran.append(1)
        return x + 1

    compiled = torch.compile(step, backend=fxguard.backend("eager", abort_after_batch_num=1))
    x = torch.ones(2)
    assert torch.equal(compiled(x), step(x))
    assert torch.equal(compiled(x), step(x))
    with pytest.raises(fxguard.BatchLimitReached, match="batch 1 has finished"):
        compiled(x)
    assert len(ran) == 4


@pytest.mark.parametrize("breaks", [False, True])
def test_the_backend_counts_a_recompiled_batch(breaks: bool) -> None:
    """A graph that TorchDynamo compiled anew for another shape begins a batch as the first did."""
    found: list[fxguard.types.Report] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if breaks:
            torch._dynamo.graph_break()
        return x + 1

    compiled = torch.compile(
        step, backend=fxguard.backend("eager", on_detect=found.append), dynamic=False
    )
    for rows in (2, 3, 3, 2):
        compiled(torch.ones(rows))
    for rows in (3, 2):
        compiled(torch.full((rows,), torch.inf))
    assert {report.batch_number for report in found} == {4, 5}
    torch._dynamo.reset()
    compiled(torch.full((5,), torch.inf))
    assert found[-1].batch_number == 6


def test_the_backend_counts_the_batches_of_each_thread() -> None:
    """Graphs that run in a thread belong to the batch that was begun in it."""
    found: list[fxguard.types.Report] = []

    def step(x: torch.Tensor, wait: Callable[[], object]) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        wait()
        return torch.log(x)

    backend = fxguard.backend("eager", on_detect=found.append)
    compiled = torch.compile(step, backend=backend)
    compiled(torch.ones(2), int)
    barrier = threading.Barrier(2)
    inputs = [torch.ones(2), torch.zeros(2)]
    threads = [
        threading.Thread(target=compiled, args=(x, functools.partial(barrier.wait, 60)))
        for x in inputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compiled(torch.zeros(2), int)
    (first, second) = found
    assert first.batch_number in (1, 2)
    assert second.batch_number == 3


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("bert", "t5"))]
)
def test_autocast_keeps_every_bit(name: str) -> None:
    """Under autocast, outside or inside the model, the results stay the same."""
    entry = zoo.ZOO[name]
    inputs = entry.inputs(torch.float32, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = torch.compile(entry.model(train=True), backend="eager")
        expected = results(plain, inputs, train=True)
        torch._dynamo.reset()
        model = fxguard.instrument(entry.model(train=True))
        assert_same(expected, results(model, inputs, train=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.campaign), "encoder", "lstm"]
)
def test_evaluation_modes_keep_every_bit(name: str, mode: Any) -> None:
    """`no_grad` and `inference_mode` give the same bits, also through fused kernels."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, True)
    with mode():
        expected = zoo.tensors_in(torch.compile(entry.model(), backend="eager")(*args, **kwargs))
        torch._dynamo.reset()
        model = fxguard.instrument(entry.model())
        for _ in range(2):
            actual = zoo.tensors_in(model(*args, **kwargs))
            for one, other in zip(expected, actual, strict=True):
                assert torch.equal(one, other)
    assert "not checked" not in fxguard.guard_of(model).coverage()


def noting(ran: list[str]) -> Callable[..., Any]:
    """A backend that notes each run of a compiled graph."""

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append("compiled")
            return graph(*args)

        return run

    return backend


@pytest.mark.parametrize("make", [Overflow, lambda: nn.Sequential(Overflow())])
def test_what_was_compiled_before_follows_the_model(make: Callable[[], nn.Module]) -> None:
    """It is checked from `instrument` on, and runs compiled and unchecked after `remove`."""
    ran: list[str] = []
    model = make()
    compiled = torch.compile(model, backend=noting(ran))
    expected = compiled(torch.ones(2, 4))
    assert ran == ["compiled"]
    fxguard.instrument(model)
    assert torch.equal(compiled(torch.ones(2, 4)), expected)
    assert ran == ["compiled"] * 2
    guard = fxguard.guard_of(model)
    assert guard.batch_number == 1
    assert "between" not in guard.coverage()
    with pytest.raises(fxguard.NonFiniteError):
        compiled(torch.full((2, 4), BAD))
    fxguard.remove(model)
    assert compiled(torch.full((2, 4), BAD)).isinf().all()
    assert guard.batch_number == 2
    assert ran == ["compiled"] * 4


def test_a_model_of_torch_nn_runs_compiled_after_remove() -> None:
    """What was compiled around the guard has to look at the model's own forward again."""
    ran: list[str] = []
    model = fxguard.instrument(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    compiled = torch.compile(model, backend=noting(ran))
    fxguard.remove(model)
    compiled(torch.ones(2, 4))
    assert ran == ["compiled"]


def test_a_deep_copy_is_guarded_on_its_own() -> None:
    """The copy has its own guard, batches and weights; the original is untouched."""
    model = fxguard.instrument(Overflow(), max_frames_to_save=5)
    model(torch.ones(2, 4))
    twin = copy.deepcopy(model)
    guard = fxguard.guard_of(twin)
    assert guard.model is twin
    assert guard.batch_number == 0
    assert guard.options.max_frames_to_save == 5
    with torch.no_grad():
        twin.linear.weight.fill_(torch.nan)
    with pytest.raises(fxguard.NonFiniteError, match=r"weight linear\.weight holds NaN"):
        twin(torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert fxguard.guard_of(model).last_report is None
    fxguard.remove(twin)
    assert fxguard.guard_of(model) is not None


def test_generate_checks_every_step() -> None:
    """A causal model generates the same tokens; each forward is a batch."""
    entry = zoo.ZOO["llama"]
    ids = zoo.byte_ids(length=6)
    expected = entry.model().generate(ids, max_new_tokens=5, do_sample=False)
    model = fxguard.instrument(entry.model())
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert fxguard.guard_of(model).batch_number == 5
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(fxguard.NonFiniteError, match=r"lm_head\.weight turned NaN"):
        model.generate(ids, max_new_tokens=5, do_sample=False)


def test_it_stays_the_same_model() -> None:
    """Class, signature, state_dict and save_pretrained's keys are those of the plain model."""
    import inspect
    import pickle

    plain, model = zoo.ZOO["bert"].model(), fxguard.instrument(zoo.ZOO["bert"].model())
    assert type(model) is type(plain)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    restored = pickle.loads(pickle.dumps(model.state_dict()))
    assert restored.keys() == plain.state_dict().keys()
    plain.load_state_dict(restored)


def test_two_models_of_one_class_are_told_apart() -> None:
    """Both share their code; each is judged by its own guard."""
    first, second = fxguard.instrument(Overflow()), fxguard.instrument(Overflow())
    first(torch.ones(2, 4))
    with pytest.raises(fxguard.NonFiniteError):
        second(torch.full((2, 4), BAD))
    assert fxguard.guard_of(first).last_report is None
    assert fxguard.guard_of(first).batch_number == fxguard.guard_of(second).batch_number == 1


def test_a_plain_model_of_the_same_class_stays_plain() -> None:
    """What is compiled for a guarded model is not used for an unguarded one."""
    fxguard.instrument(Overflow())(torch.ones(2, 4))
    assert torch.compile(Overflow(), backend="eager")(torch.full((2, 4), BAD)).isinf().all()


# Graphs that the user made.


def symbolic(model: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(model)


def exported(model: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    return torch.export.export(model, (x,)).module()


@pytest.mark.parametrize("capture", [symbolic, exported])
@pytest.mark.parametrize("name", ["cnn", "twice", "overflow"])
def test_insert_checks_returns_the_output_and_the_numbers(name: str, capture: Any) -> None:
    """Graphs from symbolic_trace and torch.export give the same bits and a frame per operation."""
    if name == "overflow":
        model, (x,) = Overflow(), (torch.full((2, 4), BAD),)
    else:
        model, (x,) = zoo.ZOO[name].model(), zoo.ZOO[name].inputs(torch.float32, False)[0]
    graph_module = capture(model.eval(), x)
    before = graph_module.code
    checked, plan = fxguard.insert_checks(graph_module)
    output, statistics = checked(x)
    assert graph_module.code == before
    assert torch.equal(output, model(x))
    assert statistics.shape == (len(plan.checks), 2)
    frames = fxguard.frames_of(plan, statistics, model)
    titles = [frame.title for frame in frames]
    guarded = fxguard.instrument(model, on_detect=lambda report: None)
    guarded(x)
    leaves = [f.title for f in fxguard.guard_of(guarded).frames() if "Identity" not in f.kind]
    assert [t for t in titles[:-1] if "Identity" not in t] == leaves[:-1]
    if name == "overflow":
        product = next(frame for frame in frames if frame.kind == "mul")
        assert product.rows[-1].abs_max == torch.inf


def test_insert_checks_takes_a_graph_with_nothing_to_measure() -> None:
    """A graph without floating-point operations gets empty statistics."""
    graph_module = torch.fx.symbolic_trace(nn.Identity())
    checked, plan = fxguard.insert_checks(graph_module)
    output, statistics = checked(torch.arange(3))
    assert torch.equal(output, torch.arange(3))
    assert statistics.shape == (len(plan.checks), 2)


def test_a_graph_module_can_be_instrumented() -> None:
    """`instrument` takes the result of symbolic_trace like any module."""
    model = fxguard.instrument(torch.fx.symbolic_trace(Overflow()))
    model(torch.ones(2, 4))
    with pytest.raises(fxguard.NonFiniteError, match="mul made inf"):
        model(torch.full((2, 4), BAD))
