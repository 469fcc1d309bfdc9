"""Autograd functions of users: named as what they are, and their own backward is looked into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options


class Norm(torch.autograd.Function):
    """An RMSNorm as authors of kernels write it: its backward cubes what float16 does not hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        hidden = gradient * weight
        inner = (hidden * x).sum(-1, keepdim=True)
        of_x = hidden * scale - x * inner * scale.pow(3) / x.shape[-1]
        return of_x, (gradient * x * scale).flatten(0, -2).sum(0), None


class Careful(Norm):
    """It has another backward, and the same forward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        hidden = (gradient * weight).float()
        normed = x.float() * scale.float()
        of_x = scale * (hidden - normed * (hidden * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (gradient * normed).to(x.dtype).flatten(0, -2).sum(0), None


class Both(torch.autograd.Function):
    """Two operands, two results, of which one is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        hidden = torch.where(x > 100, torch.full_like(x, torch.inf), of_product)  # none is
        safe = torch.where(y == 0, torch.ones_like(y), torch.reciprocal(y))  # drops an inf
        return hidden * y * safe + of_sum, of_product.div(x - x) + of_sum


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] = Norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, bias=False)
        self.weight = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.function.apply(self.first(x), self.weight, 1e-6)  # type: ignore[no-untyped-call]
        return self.last(hidden)  # type: ignore[no-any-return]


def reports_of(
    model: nn.Module, x: Tensor, backend: str | None = None
) -> list[fxguard.types.Report]:
    torch._dynamo.reset()
    found: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=found.append)
    run = torch.compile(model, backend=backend) if backend else model
    run(x).float().square().sum().mul(50).backward()
    return found


def small() -> Tensor:
    torch.manual_seed(1)
    return (torch.randn(2, 8) * 5e-4).half()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_line_of_the_backward(backend: str | None) -> None:
    """The class, the operation of its backward, the numbers and what to do."""
    (report,) = reports_of(Net().half(), small(), backend)
    assert report.message.startswith("batch 0: backward of Norm made NaN (")
    (origin,) = report.origins
    assert origin.cause == "overflow"
    line = "of_x = hidden * scale - x * inner * scale.pow(3) / x.shape[-1]"
    assert origin.operands.startswith("at [0, ")
    assert "pow(" in origin.operands
    assert origin.operands.endswith(f": {line})")
    assert "keep this pow in float32" in report.fix


class Logarithm(torch.autograd.Function):
    """Its backward calls a function of torch, and no method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return gradient + torch.log(x - x), None, None


class Unweighted(Logarithm):
    """Its backward gives no gradient to a weight that asks for one."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_weight_that_gets_no_gradient_is_healthy(backend: str | None) -> None:
    net = Net(Unweighted)
    assert reports_of(net, torch.ones(2, 8), backend) == []
    assert net.first.weight.grad is not None
    assert net.weight.grad is None
    assert fxguard.compare(Net(Unweighted), Net(Unweighted), torch.ones(2, 8)).agrees


def test_what_fails_beside_a_weight_that_gets_no_gradient_is_named() -> None:
    class Rooted(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 0).sqrt()

    (report,) = reports_of(Rooted(Unweighted), torch.ones(2, 8))
    assert report.origins[0].message.startswith("backward of sqrt made NaN (")


def test_a_function_in_a_backward_has_its_line() -> None:
    (report,) = reports_of(Net(Logarithm), torch.ones(2, 8))
    (origin,) = report.origins
    assert origin.message.startswith("backward of Logarithm made -inf (")
    assert origin.cause == "zero divisor"
    assert origin.operands.startswith("at [0, 0]: log(0.0)")
    assert origin.operands.endswith("return gradient + torch.log(x - x), None, None)")


def test_the_frame_has_its_name() -> None:
    (report,) = reports_of(Net().half(), small())
    assert report.frames[-1].title == "Norm (backward)"


@pytest.mark.parametrize("scale", [1.0, 5e-4])
def test_a_careful_one_is_healthy(scale: float) -> None:
    assert reports_of(Net(Careful).half(), (small() * (scale / 5e-4)).clamp(-1, 1)) == []


def test_what_its_backward_drops_is_not_blamed() -> None:
    """Of two that made something bad the one that reached the gradient."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            product, _ = Both.apply(hidden, hidden * 0)  # type: ignore[no-untyped-call]
            return product + hidden  # type: ignore[no-any-return]

    (report,) = reports_of(Pair(), torch.ones(2, 4))
    origin = report.origins[0]
    assert origin.message.startswith("backward of Both made ")
    assert "of_product.div(x - x)" in origin.operands
    assert origin.cause == "zero divisor"


class Noisy(torch.autograd.Function):
    """Its backward divides by 0 where a coin said so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradient / mask


def test_another_throw_of_the_dice_is_not_shown() -> None:
    """The function is known, and no number of another run is told."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return apply(Noisy, self.first(x))

    (report,) = reports_of(Net(), torch.ones(2, 4))
    assert report.message.startswith("batch 0: backward of Noisy made ")
    assert "its own backward" not in report.origins[0].operands
    assert report.origins[0].cause == "unknown"


def test_frames_of_a_traced_backward(capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy one has its frame, too."""
    model = fxguard.instrument(Net(Careful), trace_batch_nums=[0])
    model(torch.randn(2, 8)).sum().backward()
    assert "Careful (backward)  # test_autograd_functions.py:" in capsys.readouterr().out


class Spoils(torch.autograd.Function):
    """Its backward divides by 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


class Safe(torch.autograd.Function):
    """The derivative of what runs in its forward is infinite; its own is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 0).square().sqrt() + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class Broken(nn.Module):
    """It applies a function between two graphs."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = self.applied(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]

    @torch.compiler.disable
    def applied(self, hidden: Tensor) -> Tensor:
        return self.function.apply(hidden)  # type: ignore[no-any-return,no-untyped-call]


def apply(function: type[torch.autograd.Function], x: Tensor) -> Tensor:
    return function.apply(x)  # type: ignore[no-any-return,no-untyped-call]


LOSSES = {
    "the last": lambda f, out: apply(f, out.sum()),
    "in the middle": lambda f, out: apply(f, out.relu()).mean(),
    "twice": lambda f, out: apply(Safe, apply(f, apply(Safe, out))).sum(),
    "beside another": lambda f, out: apply(f, out).sum() + apply(Safe, out).sum(),
}


@pytest.mark.parametrize("where", LOSSES)
def test_in_a_loss(where: str) -> None:
    """No mode sees it applied. Its backward is the line to look at."""
    found: list[fxguard.types.Report] = []
    model = nn.Linear(4, 4)
    with fxguard.watch(model, on_detect=found.append):
        LOSSES[where](Safe, model(torch.ones(2, 4))).backward()
        assert found == []
        LOSSES[where](Spoils, model(torch.ones(2, 4))).backward()
    (report,) = found
    assert report.message.startswith("batch 1: backward of Spoils made ")
    frame = report.frames[-1]
    assert (frame.title, frame.batch_number) == ("Spoils (backward)", 1)
    assert frame.source is not None
    assert frame.source.code.startswith("def backward(ctx: Any, gradient: Tensor)")
    labels = ["grad of output", "grad of input[0]"]
    assert [(row.label, row.is_bad) for row in frame.rows] == [
        (labels[0], False),
        (labels[1], True),
    ]


def test_between_graphs() -> None:
    found: list[fxguard.types.Report] = []
    healthy = fxguard.instrument(Broken(Safe), on_detect=found.append)
    healthy(torch.ones(2, 4)).sum().backward()
    assert found == []
    model = fxguard.instrument(Broken(Spoils), on_detect=found.append)
    model(torch.ones(2, 4)).sum().backward()
    assert found[0].message.startswith("batch 0: backward of Spoils made inf (")


def test_what_runs_in_its_forward_has_another_backward() -> None:
    """Of two the one that made the bad gradient."""
    found: list[fxguard.types.Report] = []
    model = nn.Linear(4, 4)
    with fxguard.watch(model, on_detect=found.append):
        out = model(torch.ones(2, 4))
        (apply(Safe, out).sum() + (out[0, 0] * 0).square().sqrt()).backward()
    assert [origin.frame.title for origin in found[0].origins] == ["sqrt (backward)"]


def test_what_runs_before_one_in_a_loss() -> None:
    """Its result is read by the function, and by nothing that a mode sees."""
    found: list[fxguard.types.Report] = []
    model = nn.Linear(4, 4)
    with fxguard.watch(model, on_detect=found.append):
        for factor in (1, 0):
            lengths = (model(torch.ones(2, 4)) * factor).square().sum(-1).sqrt()
            apply(Safe, apply(Safe, lengths)).sum().backward()
    (report,) = found
    assert report.message.startswith("batch 1: backward of sqrt made ")


def test_two_models_in_one_loss() -> None:
    """Of a script that is run. Each of them has its report."""
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    found: list[fxguard.types.Report] = []
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        one, other = (model(torch.ones(2, 4)) for model in models)
        apply(Spoils, one + other).sum().backward()
    expected = "batch 0: backward of Spoils made inf ("
    assert [report.message.startswith(expected) for report in found] == [True, True]


def test_a_graph_that_is_retained() -> None:
    """The numbers are those of the backward that went wrong."""
    found: list[fxguard.types.Report] = []
    model = nn.Linear(4, 4)
    with fxguard.watch(model, on_detect=found.append):
        loss = apply(Times, model(torch.ones(2, 4))).sum()
        loss.backward(retain_graph=True)
        (loss * 1e30).backward()
    (report,) = found
    assert report.frames[-1].rows[0].abs_max == pytest.approx(1e30)


class Times(torch.autograd.Function):
    """Its backward overflows where a gradient is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e30
