"""Backward in every way a model runs: found where it is bad, and nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.batch.kept_run import KeptRun
from fxguard.options import Options
from fxguard.testing import assert_finite
from support.needs import OF_PYTHON_3_13_0

MESSAGE = "batch 0: backward of sqrt made inf (test_backward_passes.py:"


class Net(nn.Module):
    """Finite in forward; the gradient of its length is infinite where that is 0."""

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight.data.abs_()  # or the gradient would be inf or -inf by chance
        self.scale = scale

    def length(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return (hidden * self.scale).square().sum(-1, keepdim=True).sqrt() + hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.length(x))  # type: ignore[no-any-return]


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.length(x)
        torch._dynamo.graph_break()
        return self.head(hidden)  # type: ignore[no-any-return]


class HandedOn(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.length(x)
        torch._dynamo.graph_break()
        made, same = self.both(hidden)
        torch._dynamo.graph_break()
        return made + same

    def both(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(hidden), hidden


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.length, x, use_reentrant=self.reentrant)  # type: ignore[no-untyped-call]
        return self.head(hidden)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 4, requires_grad=True)


def backward(loss: Tensor) -> None:
    loss.backward()


def reports_of(
    model: nn.Module, run: Callable[[Tensor], object] = backward, compiler: str | None = None
) -> list[fxguard.types.Report]:
    """What is reported of one forward and what a user does with its sum."""
    found: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=found.append)
    called = model if compiler is None else torch.compile(model, backend=compiler)
    run(called(inputs()).sum())
    return found


class WrittenOnTheWay(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        torch._dynamo.graph_break()
        length = (hidden * self.scale).square().sum(-1, keepdim=True).sqrt()
        hidden.mul_(2)  # an input of the second graph; its gradient turns bad in this one
        return length + hidden


@pytest.mark.sampled
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("kind", [Net, Broken, Checkpointed, Reentrant, HandedOn, WrittenOnTheWay])
def test_the_operation_is_named(kind: type[Net], compiler: str | None) -> None:
    """In eager mode and compiled, with graph breaks and activation checkpointing of both kinds."""
    (report,) = reports_of(kind(), compiler=compiler)
    assert report.message.startswith(MESSAGE)


def test_inductor_is_judged_by_what_it_computed() -> None:
    """Its gradients decide whether there is a report; an eager second run names the place."""

    class Away(Net):
        def length(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            return (hidden - hidden.detach()).square().sum(-1, keepdim=True).sqrt() + hidden

    (report,) = reports_of(Away(), compiler="inductor")
    assert report.message.startswith(MESSAGE)


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def of_weights(loss: Tensor) -> None:
    torch.autograd.grad(loss, [x for x in leaves_of(loss) if x.requires_grad])


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves of the graph of a loss."""
    found: list[Tensor] = []
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    return found


@pytest.mark.parametrize("run", [twice, of_weights])
def test_a_graph_that_is_retained_is_reported_once(run: Callable[[Tensor], object]) -> None:
    """Twice through one graph, or by ``autograd.grad``, which fills no ``.grad``."""
    (report,) = reports_of(Net(), run)
    assert report.message.startswith(MESSAGE)


class Uncaptured(nn.Module):
    """Left to Python; the gradient of its length is infinite where that is 0."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        same = x - x.detach()
        same += 0
        return same.square().sum(-1, keepdim=True).sqrt() + x


@pytest.mark.parametrize("place", range(3))
def test_gradients_that_are_born_between_graphs(place: int) -> None:
    """At the beginning, between two graphs, and at the end."""
    torch._dynamo.reset()
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    parts.insert(place, Uncaptured())  # type: ignore[arg-type]
    model = fxguard.instrument(nn.Sequential(*parts))
    x = inputs().requires_grad_()
    with pytest.raises(fxguard.NonFiniteError) as raised:
        model(x).sum().backward()
    assert "between graphs" in fxguard.guard_of(model).coverage()
    report = raised.value.report
    made = rf"batch 0: backward of sqrt in {place} made -?inf( and -inf)? \(test_backward_passes"
    assert re.match(made, report.message)
    (origin,) = report.origins
    assert origin.cause == "singular gradient"
    assert origin.operands.startswith("at [0, 0]: sqrt(0.0); grad of output ")


class Derived(nn.Module):
    """Uses ``torch.func`` and a branch, left to Python."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        slopes = vmap(grad(lambda row: row.square().sum()))(x)
        chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return slopes + chosen  # type: ignore[no-any-return]


def test_regions_between_graphs_are_left_alone() -> None:
    """The same gradients, and no word."""

    def gradients(model: nn.Module) -> list[Tensor]:
        torch._dynamo.reset()
        model(inputs()).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Derived(), nn.Linear(4, 4))
    guarded = fxguard.instrument(copy.deepcopy(plain))
    assert all(map(torch.equal, gradients(plain), gradients(guarded)))
    assert fxguard.guard_of(guarded).last_report is None


def test_gradients_between_graphs_that_come_from_behind() -> None:
    """Of several stretches that Python runs, the one that made it is named."""
    torch._dynamo.reset()

    class Scaled(Uncaptured):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).tanh()

    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4), Uncaptured(), Scaled())
    fxguard.instrument(model)
    with pytest.raises(fxguard.NonFiniteError, match=r"backward of sqrt in 3 made inf"):
        model(inputs()).sum().backward()


def test_batches_that_share_a_backward() -> None:
    """Accumulated losses: the last batch is where the backward begins."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(), on_detect=found.append)
    sum((model(inputs()).sum() for _ in range(3)), torch.zeros(())).backward()
    assert [report.batch_number for report in found] == [2]


def test_it_is_raised_from_backward() -> None:
    """As a bad forward is raised from the call of the model."""
    model = fxguard.instrument(Net())
    loss = model(inputs()).sum()
    with pytest.raises(fxguard.NonFiniteError, match="backward of sqrt made inf") as caught:
        loss.backward()
    assert fxguard.guard_of(model).last_report is caught.value.report


def test_a_graph_that_only_writes_is_searched() -> None:
    """What it wrote belongs to an earlier graph."""

    class Rooted(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x) * 0
            torch._dynamo.graph_break()
            hidden.sqrt_()
            return hidden

    (report,) = reports_of(Rooted())
    assert report.phase == "backward"
    assert report.message.startswith("batch 0: backward of sqrt_ made inf and -inf (test_backward")


def test_a_warning_comes_once() -> None:
    """The same operation in each of three steps."""
    model = fxguard.instrument(Net(), on_detect="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(inputs()).sum().backward()
            model.zero_grad()
    assert len([each for each in caught if "backward of sqrt" in str(each.message)]) == 1


def test_what_a_bad_forward_does_to_gradients_is_no_news() -> None:
    """One report, of the forward."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(), on_detect=found.append)
    model(inputs() * torch.inf).sum().backward()
    assert [report.phase for report in found] == ["data"]


def test_weights_that_change_in_backward_accuse_nobody() -> None:
    """An optimizer that steps inside backward: the second run would compute with other weights."""
    found: list[fxguard.types.Report] = []
    model = Net()
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}

    def step(weight: Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    fxguard.instrument(model, on_detect=found.append)
    model(inputs()).sum().backward()
    assert len(found) == 1
    assert "gradient of " in found[0].message
    assert not found[0].origins[0].is_operation


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


@torch.library.custom_op("fxguard_tests::spoils_gradients", mutates_args=())
def spoils_gradients(x: Tensor) -> Tensor:
    """The same numbers; the gradient is infinite."""
    return x.clone()


spoils_gradients.register_fake(lambda x: torch.empty_like(x))
spoils_gradients.register_autograd(lambda ctx, gradient: gradient * torch.inf)


def test_a_custom_operation_has_its_name() -> None:
    """Its backward is the user's."""

    class Custom(Net):
        def length(self, x: Tensor) -> Tensor:
            return spoils_gradients(self.inner(x))

    (report,) = reports_of(Custom())
    assert "backward of spoils_gradients made inf" in report.message


def test_a_function_of_autograd_has_its_line() -> None:
    """The line that applies it."""

    class Applied(Net):
        def length(self, x: Tensor) -> Tensor:
            return Divided.apply(self.inner(x))  # type: ignore[no-any-return,no-untyped-call]

    (report,) = reports_of(Applied())
    source = report.origins[0].frame.source
    assert source is not None
    assert "Divided.apply" in source.code


def scaled_steps(scale: float, forward: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Three steps under autocast with a scaler; the reports, and the guard."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            return hidden if forward is None else forward(hidden)

    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Model(), on_detect=found.append)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(inputs()).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found, fxguard.guard_of(model)


def test_a_step_that_the_scaler_skips_is_healthy() -> None:
    """Its gradients are infinite because of the scale: a note, and no report."""
    found, guard = scaled_steps(2.0**30)
    assert found == []
    assert guard.notes


def test_a_scaler_excuses_nothing_else() -> None:
    """A gradient that is infinite at any scale is reported."""
    found, _ = scaled_steps(4.0, lambda x: (x.float() * 0).square().sum().sqrt() + x.sum())
    assert found
    assert "backward of sqrt made inf" in found[0].message


def overflow_report(*, watched: bool) -> fxguard.types.Report:
    """On a gradient of 2**17 in float16, of a loss that nobody has scaled."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4).half()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.half()).float() * 2.0**17  # type: ignore[no-any-return]

    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Model(), on_detect=found.append)
    with fxguard.watch(model) if watched else contextlib.nullcontext():
        model(inputs()).sum().backward()
    (report,) = found
    return report


def test_a_scaler_that_is_gone_excuses_nothing() -> None:
    """One that nobody can reach any more, or that has never scaled anything."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    assert overflow_report(watched=False).origins[0].phase == "backward"
    scaler.scale(torch.ones(()))
    scaler.itself = scaler
    del scaler
    assert overflow_report(watched=False).origins[0].phase == "backward"


def test_the_scaler_of_another_training_excuses_nothing() -> None:
    """One that is alive, as in a notebook, and has not scaled the loss that is watched."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    scaler.scale(torch.ones(()))
    assert overflow_report(watched=True).origins[0].phase == "backward"
    assert scaler.is_enabled()


def test_a_scaler_excuses_no_loss_of_which_it_is_known_that_it_was_not_scaled() -> None:
    """The model returns its loss, and the gradient of that is 1."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4).half()

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x.half()).float() * 2.0**17).sum()

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    scaler.scale(torch.ones(()))
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(WithLoss(), on_detect=found.append)
    (model(inputs()) / 4).backward()
    assert [report.phase for report in found] == ["backward"]
    assert scaler.is_enabled()


@pytest.mark.parametrize("scale", [2.0**30, lambda: 2.0**30])
def test_a_scale_that_the_script_keeps_by_itself(scale: Any) -> None:
    """It is said by ``loss_scale=``; without a word the gradient is a bad one."""

    def step(**options: Any) -> tuple[list[fxguard.types.Report], fxguard.types.Guard]:
        found: list[fxguard.types.Report] = []
        with fxguard.watch(nn.Linear(4, 4), on_detect=found.append, **options) as guard:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = guard.model(inputs()).sum()
            (loss.float() * 2.0**30).backward()
        return found, guard

    found, guard = step(loss_scale=scale)
    assert found == []
    assert [note.message.split(" (")[0] for note in guard.notes] == ["backward of float made inf"]
    (report,), _ = step()
    assert report.message.startswith("batch 0: backward of float made inf (test_backward_passes")


@pytest.mark.parametrize("scale", [0, -1.0, "2", True, torch.inf, torch.nan])
def test_a_scale_that_is_none(scale: Any) -> None:
    """Is refused by its value."""
    with pytest.raises(fxguard.FxguardError, match="loss_scale has to be a number above 0"):
        fxguard.instrument(nn.Linear(4, 4), loss_scale=scale)


def test_double_backward_is_left_alone() -> None:
    """A penalty on gradients: healthy, and the same numbers."""

    def penalty(model: nn.Module) -> list[Tensor]:
        x = inputs()
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    expected = penalty(copy.deepcopy(model))
    assert all(map(torch.equal, penalty(fxguard.instrument(model)), expected))


@pytest.mark.parametrize("per_sample", [False, True])
def test_gradients_of_torch_func_are_left_alone(per_sample: bool) -> None:
    """Gradients of each sample, by ``vmap``: the same numbers, and nothing is hooked."""

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).sum()

    def gradients() -> dict[str, Tensor]:
        of_loss = grad(loss)
        if per_sample:
            of_loss = vmap(of_loss, in_dims=(None, 0))
        found: dict[str, Tensor] = of_loss(dict(model.named_parameters()), inputs().detach())
        return found

    model = Net(scale=1.0)
    expected = gradients()
    fxguard.instrument(model)
    model(inputs()).sum().backward()  # weights have their hooks
    found = gradients()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def kept_runs() -> set[int]:
    """The identities of all that are alive."""
    return {id(each) for each in gc.get_objects() if type(each) is KeptRun}


class Written(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        torch._dynamo.graph_break()
        hidden.add_(self.head(x))  # an input of the second graph, which returns it
        return hidden


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("kind", [Net, Broken, Written, HandedOn])
def test_nothing_stays(kind: type[Net], replay: bool) -> None:
    """What a backward needs dies with the graph, and every hook goes with the guard."""
    gc.collect()
    before = kept_runs()  # of what other tests have left
    model = fxguard.instrument(kind(scale=1.0), replay=replay)
    for _ in range(3):
        model(inputs()).sum().backward()
    gc.collect()
    assert kept_runs() <= before
    fxguard.remove(model)
    assert [weight._backward_hooks for weight in model.parameters()] == [None] * 4


def test_without_gradients_nothing_is_hooked() -> None:
    """Evaluation keeps nothing and listens to nothing."""
    model = fxguard.instrument(Net())
    with torch.no_grad():
        model(inputs())
    assert all(weight._backward_hooks is None for weight in model.parameters())


def test_it_can_be_switched_off() -> None:
    """``backward=False`` hooks nothing."""
    model = fxguard.instrument(Net(), backward=False)
    model(inputs()).sum().backward()
    assert all(weight._backward_hooks is None for weight in model.parameters())
    assert fxguard.guard_of(model).last_report is None


def test_functions_for_tests_leave_no_hook() -> None:
    """They guard a model for one call, and its weights are the user's again."""
    model = Net(scale=1.0)
    assert_finite(model, inputs())
    assert all(weight._backward_hooks is None for weight in model.parameters())


def test_models_of_a_script_are_listened_to_until_it_ends() -> None:
    """Between calls the guard is off a model, and a backward may come."""
    found: list[fxguard.types.Report] = []
    model = Net()
    with OutermostModules(Options(on_detect=found.append)):
        model(inputs()).sum().backward()
    assert [report.message.startswith(MESSAGE) for report in found] == [True]
    assert all(weight._backward_hooks is None for weight in model.parameters())


@pytest.mark.parametrize("kind", [Net, Broken])
@pytest.mark.parametrize("asks", ["backward", "grad"])
def test_a_whole_step_is_compiled(kind: type[Net], asks: str) -> None:
    """TorchDynamo would compile hooks of a backward that begins inside of a compiled function."""
    torch._dynamo.reset()
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(kind(), on_detect=found.append)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> None:
        loss = model(x).sum()
        if asks == "backward":
            loss.backward()
        else:
            torch.autograd.grad(loss, list(model.parameters()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in ("The .grad attribute", OF_PYTHON_3_13_0):  # TorchDynamo's
            warnings.filterwarnings("ignore", message=own)
        step(inputs())
    assert [report.message.startswith(MESSAGE) for report in found] == [True]


def test_a_backward_without_the_model_belongs_to_the_batch_before_it() -> None:
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Net(scale=1.0), on_detect=found.append)
    for _ in range(3):
        model(inputs())
    (model.head.weight * math.inf).sum().backward()
    frame = found[0].frames[-1]
    assert (frame.title, frame.batch_number) == ("gradient (backward)", 2)
    assert found[0].message == "batch 2: gradient of weight head.weight is inf"
    assert found[0].verdict[1].endswith(": the backward went through no graph of the model")


def test_why_no_operation_is_accused_is_said() -> None:
    """In the report, and in `coverage()`."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * 0).square().sum().sqrt()

    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(Flat(), on_detect=found.append)
    loss = model(inputs())
    with torch.no_grad():
        model.inner.bias.add_(1)
    loss.backward()
    why = "an input of its graph was written since"
    assert found[0].verdict[1] == f"  which operation made it is not known: {why}"
    coverage = fxguard.guard_of(model).coverage()
    assert coverage.endswith(f"; 1 bad gradient without an operation: {why}")
