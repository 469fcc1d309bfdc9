"""Training steps and compiled models on the device of this machine: a GPU, or the CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support.same_results import assert_same, results


class GatedFeedForward(nn.Module):
    """The product overflows in float16 where both factors exceed 256."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


def model_on(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return GatedFeedForward().to(device, dtype)


def large(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((4, 8), 3000.0, device=device, dtype=dtype)


def first_origin(reports: list[fxguard.types.Report]) -> fxguard.types.Origin:
    (report,) = reports
    return report.origins[0]


def test_an_overflow_is_named_with_its_numbers(device: torch.device) -> None:
    """Operation, cause and counts are those of the elements on the device."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(model_on(device, torch.float16), on_detect=reports.append)
    x = large(device, torch.float16)
    x[1:] = 1.0
    with torch.no_grad():
        gate, up = model.gate(x), model.up(x)
        model(x)
    origin = first_origin(reports)
    assert (origin.what, origin.cause) == ("mul", "overflow")
    product = gate * up
    assert origin.posinf_count == int((product == torch.inf).sum())
    assert origin.neginf_count == int((product == -torch.inf).sum())
    row = next(row for row in origin.frame.rows if row.label == "output")
    assert row.abs_max == torch.inf
    assert origin.operands


def test_a_bad_gradient_is_named(device: torch.device) -> None:
    """The second run of a backward runs on the device as well."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * 0).sqrt().sum()

    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Root().to(device), on_detect=reports.append)
    model(torch.randn(2, 4, device=device)).backward()
    origin = first_origin(reports)
    assert (origin.what, reports[0].phase) == ("sqrt", "backward")


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_that_spoils_weights_is_named(
    device: torch.device, options: dict[str, bool]
) -> None:
    """However the optimizer runs its step."""
    reports: list[fxguard.types.Report] = []
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38, **options)
    with fxguard.watch(model, on_detect=reports.append):
        for _ in range(2):
            (model(torch.randn(4, 8, device=device)).square().mean() * 1e3).backward()
            optimizer.step()
    assert reports[0].phase == "optimizer"


def test_a_scaler_skips_its_steps(device: torch.device) -> None:
    """Gradients that overflow under dynamic loss scaling are no detection."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**30)
    reports: list[fxguard.types.Report] = []
    x = torch.randn(8, 8, device=device)
    with fxguard.watch(model, on_detect=reports.append):
        for _ in range(20):
            with torch.autocast(device.type, torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**30
    assert not reports


def test_a_model_on_two_devices(device: torch.device) -> None:
    """Values of one graph on the CPU and on the device are measured where they are."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).to(device)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).exp().to(device)).log_softmax(-1)

    inputs = ((torch.randn(2, 4),), {})
    torch.manual_seed(0)
    plain = Split()
    expected = results(plain, inputs, train=True)
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(plain, on_detect=reports.append)
    plain.zero_grad()
    assert_same(expected, results(model, inputs, train=True))
    assert "not checked" not in fxguard.guard_of(model).coverage()
    with torch.no_grad():
        model(torch.full((2, 4), 1e4))
    assert first_origin(reports).what == "exp"


def test_another_stream(device: torch.device) -> None:
    """A model that runs in a stream of its own is measured there."""
    if device.type != "cuda":
        pytest.skip("the CPU has no streams")
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(model_on(device, torch.float16), on_detect=reports.append)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(torch.ones(4, 8, device=device, dtype=torch.float16))
        assert not reports
        model(large(device, torch.float16))
    assert first_origin(reports).what == "mul"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models(device: torch.device, mode: str) -> None:
    """Recorded and replayed as CUDA graphs, too: the same numbers, and a fault is found later."""
    plain = torch.compile(model_on(device), mode=mode)
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    batches = [x.to(device) for x in inputs]
    with torch.no_grad():
        expected = [plain(x).clone() for x in batches]
    torch._dynamo.reset()

    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(model_on(device), on_detect=reports.append)
    compiled = torch.compile(model, mode=mode)
    with torch.no_grad():
        for x, want in zip(batches, expected, strict=True):
            torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-6)
        assert not reports
        assert fxguard.guard_of(model).batch_number == 4
        compiled(large(device) * 1e20)
    assert first_origin(reports).what == "mul"
    assert fxguard.guard_of(model).selftest()


def test_nothing_stays_allocated(device: torch.device) -> None:
    """A guarded step leaves on the device what a plain one leaves."""
    if device.type != "cuda":
        pytest.skip("nobody counts what a CPU holds")
    model = model_on(device)

    def left(steps: int) -> int:
        for _ in range(steps):
            model(torch.randn(64, 8, device=device)).square().mean().backward()
            model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    left(3)
    fxguard.instrument(model)
    before = left(3)
    assert left(30) == before
