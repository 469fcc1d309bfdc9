"""``watch``: what a script computes from the outputs of its model, up to the backward."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxguard

Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Finite, and so are its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()  # type: ignore[no-any-return]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(8, 4), torch.randn(8, 4)


def length(out: Tensor, target: Tensor) -> Tensor:
    """Finite; its gradient is not."""
    return F.mse_loss(out, target) + (out - out.detach()).square().sum(-1).sqrt().mean()


def entropy(out: Tensor, target: Tensor) -> Tensor:
    """The log of what may be zero."""
    return -(out.relu().log() * target.softmax(-1)).sum()


def scaled(out: Tensor, target: Tensor) -> Tensor:
    """Overflows float16 where the model does not."""
    return ((out - target) * 300).half().square().float().mean()


def healthy(out: Tensor, target: Tensor) -> Tensor:
    """An ordinary loss."""
    masked = out.masked_fill(out > 0.9, -torch.inf).log_softmax(-1)
    return F.cross_entropy(out, target.argmax(-1)) + F.nll_loss(masked, masked.argmax(-1))


def report_of(loss: Loss, **options: Any) -> fxguard.types.Report:
    """What is said of one step with a loss outside the model."""
    torch.manual_seed(0)
    model = Net()
    x, target = inputs()
    with fxguard.watch(model, **options), pytest.raises(fxguard.NonFiniteError) as raised:
        loss(model(x), target).backward()
    assert not torch.overrides._get_current_function_mode_stack()
    return raised.value.report


def test_what_a_loss_makes_bad_is_named_before_its_backward() -> None:
    """With its line, its operands and what to do."""
    report = report_of(entropy)
    assert report.message.startswith("batch 0: log made -inf (test_watch.py:")
    assert (report.phase, report.origins[0].cause) == ("loss", "zero divisor")
    assert report.fix.startswith("make out.relu() positive where it is computed, by softplus(...)")
    assert [frame.kind for frame in report.frames[-3:]] == ["Net", "relu", "log"]


def test_frames_of_the_step_before_come_first() -> None:
    """Those of its model, then those of its loss, in order of execution."""
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model := nn.Linear(4, 4), on_detect=found.append):
        for scale in (1.0, torch.inf):
            ((model(torch.ones(2, 4) * scale) * 2).sin() + 1).mean().backward()
    step = ["Linear", "mul", "sin", "add", "mean"]
    assert [(frame.batch_number, frame.kind) for frame in found[0].frames] == [
        *((0, kind) for kind in step),
        (1, "Linear"),
    ]


def test_an_overflow_of_a_loss() -> None:
    """In the dtype that the loss was cast to."""
    report = report_of(scaled)
    assert report.message.startswith("batch 0: square made inf (test_watch.py:")
    assert (report.phase, report.origins[0].cause) == ("loss", "overflow")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("loss", "message"), [(entropy, "log made -inf"), (length, "of sqrt made")]
)
def test_a_backward_of_several_losses(loss: Loss, message: str, compiled: bool) -> None:
    """``torch.autograd.backward`` is no method of a tensor, and is seen as well."""
    torchs_own = torch.autograd.backward
    model = Net()
    called = torch.compile(model, backend="eager") if compiled else model
    x, target = inputs()
    with fxguard.watch(model), fxguard.watch(Net()):
        out = called(x)
        torch.autograd.backward([out.sum(), out.square().sum()], retain_graph=True)
        out = called(x)
        with pytest.raises(fxguard.NonFiniteError, match=message):
            torch.autograd.backward(tensors=[out.sum(), loss(out, target)])
    assert torch.autograd.backward is torchs_own


@pytest.mark.parametrize(
    ("loss", "message"), [(entropy, "log made -inf"), (scaled, "square made inf")]
)
def test_a_loss_of_a_model_that_is_replayed(loss: Loss, message: str) -> None:
    """Of its healthy batch only the outputs have numbers, and these are what the loss was given."""
    report = report_of(loss, replay=True)
    assert report.message.startswith(f"batch 0: {message}")
    [whole] = [frame for frame in report.frames if frame.kind == "Net"]
    assert whole.rows[-1].label == "output"
    assert whole.rows[-1].abs_max == pytest.approx(0.928, rel=0.01)
    [inside] = [frame for frame in report.frames if frame.name == "fc"]
    assert inside.rows[-1].note == "not measured"


def test_a_bad_target_is_data() -> None:
    """It came with what the loss was given."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        target = target.clone()
        target[2, 1] = torch.nan
        return F.mse_loss(out, target)

    report = report_of(loss)
    assert report.message == "batch 0: input `target`: 1 NaN, in row 2"
    assert report.phase == "data"


def test_a_gradient_that_the_loss_made_bad() -> None:
    """The operations of the loss run again, as those of the model do."""
    report = report_of(length)
    assert report.message.startswith("batch 0: backward of sqrt made inf (test_watch.py:")
    assert (report.phase, report.origins[0].cause) == ("backward", "singular gradient")
    assert "sqrt(0.0); grad of output 0.125" in report.origins[0].operands


@pytest.mark.parametrize(
    ("loss", "message", "backend"),
    [
        *((entropy, "log made -inf", backend) for backend in ("eager", "aot_eager")),
        *((length, "backward of sqrt made inf", backend) for backend in ("eager", "aot_eager")),
        pytest.param(entropy, "log made -inf", "inductor", marks=pytest.mark.slow),
        pytest.param(
            *(length, "backward of sqrt made inf", "inductor"),
            marks=[pytest.mark.slow, pytest.mark.campaign],
        ),
    ],
)
def test_compiled_losses(loss: Loss, message: str, backend: str) -> None:
    """A function that somebody compiles is checked as a graph."""
    torch._dynamo.reset()
    report = report_of(torch.compile(loss, backend=backend, fullgraph=True))
    assert report.message.startswith(f"batch 0: {message} (test_watch.py:")


def test_a_compiled_loss_between_other_operations() -> None:
    """What comes before it and after it is followed, too."""
    torch._dynamo.reset()
    compiled = torch.compile(F.mse_loss, backend="aot_eager")

    def before(out: Tensor, target: Tensor) -> Tensor:
        return compiled((out - out.detach()).square().sum(-1, keepdim=True).sqrt(), target[:, :1])

    def after(out: Tensor, target: Tensor) -> Tensor:
        return (compiled(out, target) * 0).log()

    assert "backward of sqrt made inf" in report_of(before).message
    assert "log made -inf" in report_of(after).message


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.KLDivLoss(reduction="batchmean"), nn.MSELoss()]
)
def test_modules_as_losses(loss: nn.Module) -> None:
    """Their line is the one that called them."""

    def run(out: Tensor, target: Tensor) -> Tensor:
        return loss(out / (out * 0), target)  # type: ignore[no-any-return]

    report = report_of(run)
    assert report.origins[0].message.startswith("div made ")


class Doubled(torch.autograd.Function):
    """An operation that nobody sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tensor(torch.inf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_loss_that_nobody_saw_being_made() -> None:
    """No operation is accused."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        made: Tensor = Doubled.apply(F.mse_loss(out, target))  # type: ignore[no-untyped-call]
        return made

    report = report_of(loss)
    assert report.message == "batch 0: the loss holds inf"
    assert (report.phase, report.fix) == ("loss", "")


def test_a_tensor_that_was_given_other_data_is_not_what_it_was() -> None:
    """What made it is not blamed for numbers that came in by another way."""

    def assigned(out: Tensor, target: Tensor) -> Tensor:
        ratio = out / 0
        ratio.data = torch.full_like(target, torch.inf)
        return ratio.sum()

    report = report_of(assigned)
    assert report.origins[0].cause == "unknown"
    assert "div" not in "\n".join(report.verdict)


def train(model: nn.Module, loss: Loss, steps: int = 3) -> list[Tensor]:
    """Some steps of training: losses, gradients and weights."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found = []
    for _ in range(steps):
        x, target = inputs()
        value = loss(model(x), target)
        value.backward()
        found += [
            value.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def noisy(out: Tensor, target: Tensor) -> Tensor:
    """Random numbers, writes, views, numbers in front, integers, and a metric that is NaN."""
    out = F.dropout(out, 0.5) + torch.randn_like(out)
    out += 1
    part = out[:, ::2]
    part.mul_(0.5)
    accuracy = (out.argmax(-1) == target.argmax(-1)).float().mean()
    precision = accuracy * 0 / (accuracy * 0)
    assert precision.isnan()
    with torch.no_grad():
        weight = torch.where(out > 0, out, 0).sum()
    return (2 - out).square().mean() + 1 / (1 + out.std()) + weight * out.mean()


@pytest.mark.parametrize("loss", [healthy, noisy])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_training_is_bit_for_bit_what_it_was(loss: Loss, backend: str | None) -> None:
    """And the healthy is not reported."""
    torch._dynamo.reset()
    if backend is not None:
        loss = torch.compile(loss, backend=backend)
    torch.manual_seed(0)
    plain = Net()
    watched = copy.deepcopy(plain)
    expected = train(plain, loss)
    with fxguard.watch(watched) as guard:
        found = train(watched, loss)
    assert guard.last_report is None
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert all(p._backward_hooks is None for p in watched.parameters())
    assert type(watched).forward == watched.forward.__func__  # type: ignore[attr-defined]


def test_modes_of_the_script_stay_as_they_are() -> None:
    """Ours stands below them, and is gone when nobody follows a loss."""
    seen: list[str] = []

    class Listening(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = Net()
    x, target = inputs()
    with fxguard.watch(model):
        with Listening(), torch.device("cpu"):
            out = model(x)
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
        with Listening():
            loss = length(out, target)
        with pytest.raises(fxguard.NonFiniteError, match="backward of sqrt"):
            loss.backward()
        with torch.no_grad():
            model(x)
        assert not torch.overrides._get_current_function_mode_stack()
    assert "sqrt" in seen


def test_arguments_by_keyword() -> None:
    """Beside others that are not of the loss."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        chosen = torch.where(target > 0, input=out * 0, other=torch.zeros(()))
        return chosen.log().mean()

    assert "log made -inf" in report_of(loss).message


def test_a_step_of_another_optimizer_in_between() -> None:
    """As of a discriminator: the loss goes on."""
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(other.parameters())
    x, target = inputs()
    with fxguard.watch(model):
        out = model(x)
        F.mse_loss(other(out.detach()), target).backward()
        optimizer.step()
        with pytest.raises(fxguard.NonFiniteError, match="log made -inf"):
            (other(out) * 0).log().mean().backward()


def test_a_teacher_takes_the_kernels_that_it_takes_alone() -> None:
    """Modules with fused kernels look for modes: ours stands aside, also where they raise."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2).eval()
    model = nn.Linear(16, 16)
    x = torch.randn(4, 8, 16)

    def taught() -> Tensor:
        out = model(x)
        with torch.no_grad():
            target: Tensor = teacher(out)
            with pytest.raises(RuntimeError):
                teacher(out[..., :3])
        assert target.isfinite().all()
        F.mse_loss(out, target).backward()
        return target

    expected = taught()
    hooks = torch.nn.modules.module._global_forward_hooks
    with fxguard.watch(model):
        assert torch.equal(taught(), expected)
        out = model(x)
        assert hooks
        with pytest.raises(fxguard.NonFiniteError, match="log made -inf"):
            (teacher(out) * 0).log().mean().backward()
    assert not hooks


def test_a_compiled_module_as_a_loss() -> None:
    """Its graph is checked, and hooks of ours leave nothing in it."""
    torch._dynamo.reset()
    compiled = torch.compile(nn.KLDivLoss(reduction="batchmean"), backend="aot_eager")

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return compiled((out * 0).log(), target.softmax(-1))  # type: ignore[no-any-return]

    assert "log made -inf" in report_of(loss).message
    model = Net()
    x, target = inputs()
    with fxguard.watch(model) as guard:
        for _ in range(2):
            compiled(model(x).log_softmax(-1), target.softmax(-1)).backward()
    assert guard.last_report is None


def test_two_losses_of_one_output() -> None:
    """Each is looked at when its backward comes."""
    model = Net()
    x, target = inputs()
    with fxguard.watch(model):
        out = model(x)
        good, bad = F.mse_loss(out, target), entropy(out, target)
        good.backward(retain_graph=True)
        with pytest.raises(fxguard.NonFiniteError, match="log made -inf"):
            bad.backward()


def test_a_gradient_penalty() -> None:
    """``autograd.grad`` in a loss: what it returns is followed."""
    model = Net()
    x, _ = inputs()
    x.requires_grad_()
    with fxguard.watch(model):
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = ((gradient * 0).norm(dim=-1).log()).mean()
        with pytest.raises(fxguard.NonFiniteError, match="log made -inf"):
            (out.mean() + penalty).backward()


def test_a_scaler_of_gradients_skips_a_step_of_a_loss() -> None:
    """That its scale is too large is what the scaler is there for."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = inputs()
    with fxguard.watch(model) as guard:
        loss = (model(x) - target).half().mul(30).square().float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert guard.last_report is None
    (note,) = guard.notes
    assert note.message.startswith("backward of square made inf and -inf (")
    assert scaler.get_scale() == 2.0**15


def test_a_loss_in_another_thread() -> None:
    """Each thread that calls the model is followed."""
    model = Net()
    x, target = inputs()
    messages: list[str] = []

    def step() -> None:
        try:
            entropy(model(x), target).backward()
        except fxguard.NonFiniteError as error:
            messages.append(error.report.message)

    with fxguard.watch(model):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert "log made -inf" in messages[0]
    assert not torch.nn.modules.module._global_forward_hooks


def test_what_the_script_keeps_to_itself_is_not_reported() -> None:
    """A NaN that it looks for itself never reaches a backward."""
    model = Net()
    x, target = inputs()
    with fxguard.watch(model) as guard:
        for _ in range(3):
            loss = entropy(model(x), target)
            if not loss.isfinite():
                continue
            loss.backward()
    assert guard.last_report is None


def test_nothing_is_followed_after_a_step() -> None:
    """The weights have changed: what was computed before has no backward any more."""
    model = Net()
    x, target = inputs()
    with fxguard.watch(model) as guard:
        assert guard.whole_step is not None
        F.mse_loss(model(x), target).backward()
        assert guard.whole_step.losses._following().loss is not None
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert guard.whole_step.losses._following().loss is None


def test_a_model_that_is_instrumented_keeps_its_guard() -> None:
    """And its options, which are given once."""
    model = fxguard.instrument(Net(), on_detect=lambda report: None)
    with pytest.raises(fxguard.FxguardError, match="is instrumented already, with its options"):
        fxguard.watch(model, strict=True).__enter__()
    x, target = inputs()
    with fxguard.watch(model) as guard:
        assert guard is fxguard.guard_of(model)
        with pytest.raises(fxguard.FxguardError, match="is watched already"):
            fxguard.watch(model).__enter__()
        entropy(model(x), target).backward()
        assert guard.last_report is not None
    assert fxguard.guard_of(model) is guard
    with pytest.raises(fxguard.FxguardError, match="needs a"):
        fxguard.watch(3).__enter__()  # type: ignore[arg-type]


def test_a_compiled_model_between_losses_warns_of_nothing() -> None:
    """Torch's warning of global hooks is not about hooks of the user; filters are as they were."""
    gc.collect()  # a watch that raised in an earlier test needs the silence until it is gone
    before = list(warnings.filters)
    model = Net()
    run = torch.compile(model, backend="eager")
    x, target = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = list(warnings.filters)
        with fxguard.watch(model):
            for _ in range(2):  # gradients of two batches are accumulated, and two make one loss
                healthy(run(x), target).backward()
                healthy(run(x) + run(x + 1), target).backward()
        assert list(warnings.filters) == inside
    assert list(warnings.filters) == before


def test_a_watch_that_nobody_enters_says_so() -> None:
    """The warning names the line of the call; used with a block or as a decorator there is none."""
    net = Net()
    with pytest.warns(RuntimeWarning, match="called without `with`, so nothing is checked") as said:
        fxguard.watch(net)
    line = inspect.currentframe()
    assert line is not None
    assert (said[0].filename, said[0].lineno) == (__file__, line.f_lineno - 4 + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fxguard.watch(net) as guard:
            net(inputs()[0])
        assert guard.batch_number == 1

        @fxguard.watch(net)
        def train() -> bool:
            is_new = fxguard.guard_of(net).batch_number == 0
            net(inputs()[0])
            return is_new

        assert train()
        assert train()
        gc.collect()


class Encoder(nn.Module):
    """A model whose script calls methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_a_block_without_a_forward_says_so() -> None:
    """Its methods run parts that nobody checks; a block that raises says nothing more."""
    model = Encoder()
    message = "ran no forward of Encoder"
    with pytest.warns(RuntimeWarning, match=message) as told, fxguard.watch(model):
        model.encode(torch.full((2, 3), torch.nan))
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fxguard.watch(model):
            model(torch.ones(2, 3))
        with pytest.raises(KeyError), fxguard.watch(model):
            raise KeyError
