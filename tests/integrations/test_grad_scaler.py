"""Dynamic loss scaling: what overflows in the backward is its business, in the forward is ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support.answers import expect_no_contradiction

pytestmark = pytest.mark.slow


class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_gradients_that_overflow_are_no_detection(backend: str) -> None:
    """The scaler skips its steps until the scale fits; then a forward that overflows is found."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = fxguard.instrument(GatedFeedForward())
    run = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    x = torch.randn(8, 16)
    skipped = 0
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run(x).float().square().mean()
        scaler.scale(loss).backward()
        skipped += any(not p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 0 < skipped < 40
    assert scaler.get_scale() < 2.0**30
    assert fxguard.guard_of(model).last_report is None
    assert fxguard.guard_of(model).batch_number == 40
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(fxguard.NonFiniteError, match="batch 40: mul made inf"),
    ):
        run(x * 1000)


def scaled(scale: float, loss: Callable[[Tensor], Tensor]) -> list[fxguard.types.Report]:
    """The reports on one backward of a loss that a scaler has scaled."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(2, 8)).float()
        scaler.scale(loss(out)).backward()
    return found


FACTORS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "of each element": (1e5, lambda out: (out * 1e5).sum()),
    "of the sum": (1e6, lambda out: out.sum() * 1e6),
    "a divisor": (1e6, lambda out: (out / 1e-6).sum()),
}


@pytest.mark.parametrize(
    ("name", "scale"),
    [("of each element", 4.0), ("of the sum", 1.0), ("of the sum", 2.0**16), ("a divisor", 8.0)],
)
def test_a_factor_of_the_loss_is_no_loss_scale(name: str, scale: float) -> None:
    """The scaler's scale is known: what is left is a weight of the loss, and told as one."""
    factor, loss = FACTORS[name]
    [report] = scaled(scale, loss)
    [origin] = report.origins
    assert origin.cause == "overflow"
    assert origin.needed == pytest.approx(factor)  # the scale is divided out of all numbers
    fix = str(origin.fixes[0])
    assert fix == f"a factor of 2**15 at most in the loss: it is {factor:g} (advice)"
    assert f"without the loss's factor of {factor:g} it is at most 1: that factor" in report.why
    denied = f"without the loss scale of {scale:g} it is inf too: not the loss scale"
    assert (denied in report.why) is (scale != 1)
    expect_no_contradiction(report)
    assert scaled(scale, lambda out: loss(out) * 2.0**14 / factor) == []


def test_a_tensor_that_scales_the_loss_is_called_neither() -> None:
    """Only constants are read from a graph; the scale is known, and not to blame."""
    weight = torch.tensor(1e6)
    [report] = scaled(8.0, lambda out: (out * weight).sum())
    assert report.origins[0].cause == "overflow"
    assert "factor" not in str(report.fix)
    assert report.why[-1] == "without the loss scale of 8 it is inf too: not the loss scale"


def training(step: Callable[..., object], **options: object) -> list[fxguard.types.Report]:
    """The reports on one scaled step whose gradients do not fit float16.

    Args:
        step: called with the scaler, the optimizer and the model.
        options: of ``watch``.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append, **options):  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(2, 8)).float()
        loss = out.square().sum() * 10
        (scaler.scale(loss) if "loss_scale" not in options else loss * 2.0**16).backward()
        step(scaler, optimizer, model)
    return found


def plain(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
    optimizer.step()


def clipped(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module) -> None:
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    optimizer.step()


def unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    optimizer.step()
    scaler.update()


@pytest.mark.parametrize("step", [plain, clipped, unscaled])
def test_a_step_that_the_scaler_would_have_skipped(step: Callable[..., object]) -> None:
    """The gradients were bad when the backward ended, which only the scaler's step excuses."""
    [report] = training(step)
    assert report.message.startswith("batch 0: SGD's step made weight weight ")
    [origin] = report.origins
    assert origin.cause == "loss scale"
    assert origin.operands.startswith(
        "the gradient was not finite when the backward of batch 0 ended, because of the loss scale "
        "of 65536: backward of "
    )
    first, *others = (fix.text for fix in origin.fixes)
    assert first.startswith(
        "scaler.step(optimizer) in place of optimizer.step(): it skips such a step"
    )
    unscales = ["call scaler.unscale_(optimizer) first, where gradients are clipped"]
    assert others == (unscales if step is clipped else [])


def test_a_step_that_the_scaler_skips_is_healthy() -> None:
    """The fix of the report above."""

    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    assert training(step) == []


def test_an_update_by_hand_of_gradients_that_the_scaler_excuses() -> None:
    """Nobody skips it: the next batch says so, with the line of the update."""

    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module) -> None:
        with torch.no_grad():
            for p in m.parameters():
                assert p.grad is not None
                p -= 1e-3 * p.grad
        m(torch.ones(2, 8))

    [report] = training(step)
    assert report.verdict[0].startswith("all 2 weights turned ")
    assert report.fix.startswith("skip the update of sub_ (test_grad_scaler.py:")
    assert "the loss scale of 65536 made gradients of batch 0 not finite" in report.fix


def test_a_scale_of_ones_own_is_not_a_scalers() -> None:
    """There is no scaler whose step could be called."""
    [report] = training(plain, loss_scale=2.0**16)
    assert report.origins[0].cause == "loss scale"
    assert report.fix == (
        "skip the step while a gradient is not finite, and lower the loss scale (advice)"
    )


def test_gradients_that_are_still_scaled_overflow_a_weight() -> None:
    """They are finite, and larger than they should be by the scale."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e36)
    scaler = torch.amp.GradScaler("cpu")
    with fxguard.watch(model):
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        with pytest.raises(fxguard.NonFiniteError) as raised:
            optimizer.step()
    [origin] = raised.value.report.origins
    assert origin.cause == "overflow"
    assert origin.operands.endswith("still multiplied by the loss scale of 65536")
    assert origin.fixes[0].text.startswith("scaler.step(optimizer) in place of optimizer.step()")


Step = Callable[[torch.amp.GradScaler, torch.optim.Optimizer, nn.Module], object]


def two_batches(
    step: Step, *, scale: float = 2.0**16, enabled: bool = True
) -> fxguard.types.Report:
    """The report on a second batch that overflows float16, after a step with finite gradients.

    After a healthy step, the script itself makes a weight too large, and the third batch fails.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    x, found = torch.randn(16, 8), list[fxguard.types.Report]()
    with fxguard.watch(model, on_detect=found.append):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        step(scaler, optimizer, model)
        assert found == []
        with torch.autocast("cpu", torch.float16):
            model(x)
        if not found:
            with torch.no_grad():
                model[2].weight.mul_(1e3)
            with torch.autocast("cpu", torch.float16):
                model(x * 1e3)
    [report] = found
    return report


def by_scaler(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module) -> None:
    scaler.step(optimizer)
    scaler.update()


def clipped_by_scaler(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module
) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    by_scaler(scaler, optimizer, m)


def updated_first(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module
) -> None:
    scaler.unscale_(optimizer)
    scaler.update()
    optimizer.step()


def stepped_twice(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module
) -> None:
    by_scaler(scaler, optimizer, m)
    optimizer.step()


def divided(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, m: nn.Module) -> None:
    for p in m.parameters():
        assert p.grad is not None
        p.grad.div_(scaler.get_scale())
    optimizer.step()


def test_a_step_on_scaled_gradients_is_said_before_what_overflows_later() -> None:
    """Its gradients are finite and 65536 times too large: float32 would only hide it."""
    report = two_batches(plain)
    assert report.message.startswith("batch 1: linear in 2 made inf")
    first, *others = report.fix.splitlines()
    assert first == (
        "SGD's step of batch 0 read gradients that are still multiplied by the loss scale of "
        "65536: scaler.step(optimizer), then scaler.update(), in place of optimizer.step() (advice)"
    )
    assert "float32" in others[0]
    assert any(" in batch 0: the weights" in line for line in report.why)


HEALTHY: list[Step] = [by_scaler, clipped_by_scaler, updated_first, stepped_twice, divided]


@pytest.mark.parametrize("step", HEALTHY)
def test_gradients_without_the_scale_are_no_reason(step: Step) -> None:
    """The scaler has unscaled them, or the script has divided them itself."""
    report = two_batches(step)
    assert report.batch_number == 2
    assert "loss scale" not in str(report)


@pytest.mark.parametrize(("scale", "enabled"), [(1.0, True), (2.0**16, False)])
def test_a_scaler_that_does_not_scale_is_no_reason(scale: float, enabled: bool) -> None:
    """A scale of 1, or one that is switched off, leaves gradients as they are."""
    assert "loss scale" not in str(two_batches(plain, scale=scale, enabled=enabled))


def test_two_losses_of_one_output() -> None:
    """A scaler has scaled one of them; the other optimizer's is what the script computed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, second = (torch.optim.SGD(part.parameters(), 0.05) for part in net)
    scaler = torch.amp.GradScaler("cpu")
    found: list[fxguard.types.Report] = []
    with fxguard.watch(net, on_detect=found.append):
        out = net(torch.randn(4, 8))
        scaler.scale(out.mean()).backward(inputs=[*net[0].parameters()], retain_graph=True)
        out.square().mean().backward(inputs=[*net[1].parameters()])
        scaler.step(first)
        scaler.update()
        second.step()
        with torch.no_grad():
            net[1].weight.mul_(1e3)
        net(torch.full((4, 8), 1e38))
    [report] = found
    assert report.origins[0].cause == "overflow"
    assert "loss scale" not in str(report)


@pytest.mark.parametrize("is_scaled_first", [False, True])
def test_of_two_losses_only_one_is_scaled(is_scaled_first: bool) -> None:
    """The optimizer that steps by itself belongs to the other one, whose gradients are plain."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    both = [torch.optim.SGD(part.parameters(), 0.05) for part in model]
    scaler = torch.amp.GradScaler("cpu")
    net = Parts(model)
    found: list[fxguard.types.Report] = []
    x = torch.randn(4, 8)
    with fxguard.watch(net, on_detect=found.append):
        for index in (0, 1) if is_scaled_first else (1, 0):
            loss = net(x, index).square().mean()
            (scaler.scale(loss) if index == 0 else loss).backward()
        scaler.step(both[0])
        scaler.update()
        both[1].step()
        with torch.no_grad():
            model[1].weight.mul_(1e3)
        net(torch.full((4, 8), 1e38), 1)
    [report] = found
    assert report.origins[0].cause == "overflow"
    assert "loss scale" not in str(report)


class Parts(nn.Module):
    """Two parts, each of which is called by itself."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.parts[index](x)
