"""``error_budget``: how wrong an output is in a dtype, and which lines that comes from."""

from __future__ import annotations

import copy
import linecache
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from budget.lost_digits import PROGRAMS
from fxguard.types import ErrorBudget, ErrorShare

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def code_of(row: ErrorShare) -> str:
    assert row.source is not None, row
    return linecache.getline(row.source.file, row.source.line)


class Blocks(nn.Module):
    """Layers with a residual stream."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(32),
                nn.Linear(32, 64),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(64, 32),
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x += 0.5  # in place
        return self.head(x.mean((2, 3)))


HEALTHY = {
    "layers": (Blocks, (4, 8, 32)),
    "attention": (Attention, (2, 16, 32)),
    "convolutions": (Convolutions, (4, 3, 12, 12)),
}


@HALVES
@pytest.mark.parametrize(("kind", "shape"), HEALTHY.values(), ids=HEALTHY)
def test_the_error_is_explained(
    kind: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """What is predicted of each projection is what is measured."""
    torch.manual_seed(0)
    budget = fxguard.error_budget(kind(), torch.randn(shape), dtype=dtype)
    assert budget.explained == pytest.approx(1, abs=0.1)
    assert budget.is_rounding
    assert not budget.fix
    assert sum(row.share for row in budget.rows) == pytest.approx(1)
    assert not budget.not_judged


# Two are within 4 units of roundoff; of the third the input is rounded, too: no line mends that.
WITHOUT_FIX = {"1 - p", "a sum of losses", "Fourier features"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_that_loses_the_digits_is_the_first(name: str) -> None:
    """And computing it in float32, up to what amplifies its error, leaves less than half of it."""
    kind, x = PROGRAMS[name]
    torch.manual_seed(0)
    budget = fxguard.error_budget(kind(), x, dtype=torch.bfloat16)
    assert "# lost" in code_of(budget.rows[0]), budget
    assert bool(budget.fix) == (name not in WITHOUT_FIX), budget
    if budget.fix:
        lines = [int(x) for x in re.findall(r"\d+", budget.fix.partition(" in float32")[0])]
        source = budget.rows[0].source
        assert source is not None
        assert lines[0] <= source.line <= lines[-1]


def test_a_table_of_positions() -> None:
    """The best known bug of half precision, and what it says."""
    kind, x = PROGRAMS["positions"]
    torch.manual_seed(0)
    budget = fxguard.error_budget(kind(), x, dtype=torch.bfloat16)
    first, second, *_ = budget.verdict
    assert first.startswith("bfloat16 changes the output by ")
    assert "of 2.4 digits are left" in first
    assert "arange lost_digits.py" in second
    assert "amplified" in second
    assert ", by " in second
    assert budget.fix.endswith("%")
    assert "(tried)" in budget.fix
    assert budget.error > 0.1
    assert budget.digits < 1


def test_a_part_of_a_model_in_another_dtype_is_what_it_is() -> None:
    """With one line in float32 the other shares stay what they were."""

    class Two(nn.Module):
        def __init__(self, wide: bool) -> None:
            super().__init__()
            self.wide = wide

        def forward(self, x: Tensor) -> Tensor:
            big = x.float() + 40 if self.wide else x + 40
            return (big - 40).to(x.dtype) * 3.7

    x = torch.randn(256)
    rough = fxguard.error_budget(Two(False), x, dtype=torch.bfloat16)
    fine = fxguard.error_budget(Two(True), x, dtype=torch.bfloat16)
    predicted = rough.error * math.sqrt(sum(row.share for row in rough.rows[1:]))
    assert fine.error == pytest.approx(predicted, rel=0.7)
    assert fine.error < rough.error / 10


def test_several_graphs() -> None:
    """Errors of the first graph count by what the second one makes of them."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            far = x + 200
            torch._dynamo.graph_break()
            return (far - 200).exp()

    budget = fxguard.error_budget(Broken(), torch.randn(64), dtype=torch.bfloat16)
    assert "far = x + 200" in code_of(budget.rows[0])
    assert budget.rows[0].share > 0.9


def test_operations_between_graphs() -> None:
    """They are not looked at, and the error is that of the whole model all the same."""

    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.far(x) - 100

        @torch.compiler.disable
        def far(self, x: Tensor) -> Tensor:
            return x + 100

    x = torch.rand(64)
    budget = fxguard.error_budget(Between(), x, dtype=torch.bfloat16)
    low = (x.bfloat16() + 100 - 100).double()
    assert budget.error == pytest.approx(float((low - x.double()).norm() / x.double().norm()))
    assert not budget.adds_up
    assert budget.verdict[-1] == "not looked at: 1 operation between graphs"


def test_what_is_written_in_place() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
            made[:, : x.shape[1]] = x * 3
            made[:, x.shape[1] :].copy_(x.exp())
            made.add_(30)
            made.exp_().log_()
            return made - 30

    budget = fxguard.error_budget(Writes(), torch.randn(8, 8), dtype=torch.bfloat16)
    assert "made.add_(30)" in code_of(budget.rows[0])
    assert budget.explained == pytest.approx(1, abs=0.2)


def test_tables_that_nobody_differentiates() -> None:
    """Under ``no_grad``, and behind ``detach``."""

    class Table(nn.Module):
        def __init__(self, cut: bool) -> None:
            super().__init__()
            self.cut = cut

        def forward(self, x: Tensor) -> Tensor:
            if self.cut:
                table = (torch.arange(x.shape[-1], dtype=x.dtype) * 0.37).detach()
            else:
                with torch.no_grad():
                    table = torch.arange(x.shape[-1], dtype=x.dtype) * 0.37
            return x * table.sin()

    for cut in (True, False):
        budget = fxguard.error_budget(Table(cut), torch.randn(4, 256), dtype=torch.bfloat16)
        assert "* 0.37" in code_of(budget.rows[0]), budget
        assert budget.rows[0].share > 0.9


def test_bodies_of_checkpointing() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = checkpoint(lambda y: (y + 90) * 1.5, x, use_reentrant=False)
            assert isinstance(made, Tensor)
            return made - 135

    budget = fxguard.error_budget(Again(), torch.randn(64), dtype=torch.bfloat16)
    assert "(y + 90)" in code_of(budget.rows[0])


@HALVES
def test_random_operations_draw_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Blocks(dropout=0.5).train()
    budget = fxguard.error_budget(model, torch.randn(4, 8, 32), dtype=dtype)
    assert budget.explained == pytest.approx(1, abs=0.1)
    assert budget.is_rounding


def test_under_autocast_weights_are_not_rounded_beforehand() -> None:
    torch.manual_seed(0)
    budget = fxguard.error_budget(Blocks(), torch.randn(4, 8, 32), autocast=True)
    assert budget.dtype == "bfloat16"
    assert not any(row.is_given for row in budget.rows)
    assert budget.explained == pytest.approx(1, abs=0.1)


def test_as_it_is() -> None:
    torch.manual_seed(0)
    budget = fxguard.error_budget(Blocks(), torch.randn(4, 8, 32), dtype=None)
    assert budget.dtype == "float32"
    assert 0 < budget.error < 1e-6
    assert budget.explained == pytest.approx(1, abs=0.1)


def test_a_number_of_the_users() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 8, 32)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    budget = fxguard.error_budget(model, x, dtype="bf16", of=loss)
    assert budget.of == "loss(output)"
    low = copy.deepcopy(model).bfloat16()(x.bfloat16()).double().square().mean()
    wide = copy.deepcopy(model).double()(x.double()).square().mean()
    assert budget.error == pytest.approx(float((low - wide).abs() / wide), rel=1e-6)
    assert budget.explained == pytest.approx(1, abs=0.1)


class Said(NamedTuple):
    loss: Tensor
    logits: Tensor


def test_the_loss_that_a_model_returns() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Blocks()

        def forward(self, x: Tensor) -> Said:
            logits = self.body(x)
            return Said(logits.square().mean(), logits)

    budget = fxguard.error_budget(WithLoss(), torch.randn(4, 8, 32))
    assert budget.verdict[0].startswith("bfloat16 changes the loss by ")


def test_what_a_dtype_cannot_hold() -> None:
    """It is said first, and own errors of such elements are left out."""

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 5).exp()

    budget = fxguard.error_budget(Large(), torch.tensor([0.0, 1.0, 9.0]), dtype=torch.float16)
    assert budget.error == math.inf
    assert budget.digits == 0
    assert budget.verdict[0] == "in float16 the output is not finite"
    assert budget.rows
    assert all(math.isfinite(row.share) for row in budget.rows)


def test_an_operation_without_a_float64_kernel() -> None:
    """It is told, and the rest is judged."""

    @torch.library.custom_op("fxguard_tests::in_half", mutates_args=())
    def in_half(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("not for float64")
        return x * 2

    @in_half.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return in_half(x + 1) + (x + 60) - 60

    budget = fxguard.error_budget(Custom(), torch.randn(64))
    assert [name for name, _ in budget.not_judged] == ["in_half"]
    assert any("not judged: in_half" in line for line in budget.verdict)
    assert any("(x + 60)" in code_of(row) for row in budget.rows[:2])


def test_what_chose_otherwise() -> None:
    """A router, a comparison and a rounding: how many, and by which margin."""

    class Routes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.router(x).softmax(-1).topk(2, -1)
            made = torch.stack([expert(x) for expert in self.experts], 1)
            picked = made.gather(1, chosen[..., None].expand(-1, -1, 16))
            kept = (picked * weight[..., None]).sum(1)
            return kept * (kept > kept.flip(0)) + (kept * 20).round()

    torch.manual_seed(0)
    budget = fxguard.error_budget(Routes(), torch.randn(2000, 16), dtype=torch.bfloat16)
    kinds = {each.kind: each for each in budget.choices}
    assert {"topk", "gt", "round"} <= set(kinds)
    routed = kinds["topk"]
    assert 0 < routed.otherwise < routed.of == 4000
    assert 0 <= routed.margin < 0.05
    assert any("topk" in line and "chose otherwise for" in line for line in budget.verdict)


def test_forecasts_and_comparisons_carry_it() -> None:
    kind, x = PROGRAMS["positions"]
    torch.manual_seed(0)
    model = kind()
    forecast = fxguard.forecast(model, x, dtype="bf16")
    assert forecast.budget is not None
    assert forecast.verdict[1].startswith("bfloat16 changes the output by ")
    assert "arange lost_digits.py" in forecast.verdict[2]
    found = fxguard.compare(model, copy.deepcopy(model).bfloat16(), x)
    assert found.outcome == "precision"
    assert found.budget is not None
    assert any("where the digits of B went" in line for line in found.verdict)
    assert any("arange lost_digits.py" in line for line in found.verdict)


def test_a_plan_takes_what_has_the_largest_shares() -> None:
    """Fewer runs than a search among all operations, which took 23."""
    kind, x = PROGRAMS["positions"]
    torch.manual_seed(0)
    plan = fxguard.forecast(kind(), x, dtype="bf16").plan()
    assert plan.verified
    assert {":arange", ":cos", ":sin"} <= set(plan.operations)
    assert plan.runs < 20


def test_nothing_chose_otherwise() -> None:
    class Compares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x * 3, x)

    budget = fxguard.error_budget(Compares(), torch.tensor([-1.0, 1.0, 2.3]))
    assert budget.choices == ()


@HALVES
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    """Their errors are those of two backward passes, and what they come from is said."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 8, 32)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    budget = fxguard.error_budget(model, x, dtype=dtype, of=loss, gradients=True)
    low, wide = copy.deepcopy(model).to(dtype), copy.deepcopy(model).double()
    loss(low(x.to(dtype))).backward()
    loss(wide(x.double())).backward()
    for name, error in budget.gradients:
        one, other = low.get_parameter(name).grad, wide.get_parameter(name).grad
        assert one is not None
        assert other is not None
        gap = (one.double() - other).norm() / other.norm()
        assert error == pytest.approx(float(gap), rel=1e-4), name
    assert len(budget.gradients) == len(list(model.parameters()))
    assert budget.gradient_rows
    assert budget.gradient_rows[0].share > 0
    assert any(line.startswith("gradients: the worst of ") for line in budget.verdict)
    assert all(weight.grad is None for weight in model.parameters())


def test_the_model_stays_what_it_is() -> None:
    torch.manual_seed(0)
    model, x = Convolutions().train(), torch.randn(4, 3, 12, 12)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    fxguard.error_budget(model, x, dtype=torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.training
    with pytest.raises(fxguard.FxguardError, match="not instrumented"):
        fxguard.guard_of(model)


class Field(nn.Module):
    """A scalar field of points."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 16), nn.Linear(16, 1)

    def at(self, point: Tensor) -> Tensor:
        return self.outer(self.inner(point).tanh()).squeeze(-1)


class Mapped(Field):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.at, in_dims=1)(x.T)


class Descends(Field):
    def forward(self, x: Tensor) -> Tensor:
        return x - 0.1 * torch.func.grad(lambda y: self.at(y).square().sum())(x)


class Laplacian(Field):
    def forward(self, x: Tensor) -> Tensor:
        def laplacian(point: Tensor) -> Tensor:
            return torch.func.hessian(self.at)(point).diagonal().sum()

        return torch.func.vmap(laplacian)(x) + torch.func.vmap(self.at)(x)


@pytest.mark.parametrize("kind", [Mapped, Descends, Laplacian])
def test_torch_func_in_a_model(kind: type[Field]) -> None:
    torch.manual_seed(0)
    budget = fxguard.error_budget(kind(), torch.randn(16, 3))
    assert {"linear", "tanh", "weight"} <= {row.kind for row in budget.rows}
    if kind is Mapped:
        assert 0.9 < budget.explained < 1.1
        assert not budget.not_judged
    else:  # the derivative is taken as one operation
        ((name, why),) = budget.not_judged
        assert name == "_autograd_grad"
        assert why == "a derivative of torch.func, whose operations are not measured one by one"


def test_an_exact_model() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    budget = fxguard.error_budget(Doubles(), torch.ones(4))
    assert budget.error == 0
    assert budget.rows == ()
    assert str(budget) == "bfloat16 does not change the output"


class Unlucky(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (torch.relu, {}, "needs a torch.nn.Module"),
        (Blocks(), {"dtype": torch.float8_e4m3fn}, "float8"),
        (Unlucky(), {}, "captured no operation"),
    ],
    ids=["no module", "float8", "nothing captured"],
)
def test_wrong_use(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(fxguard.FxguardError, match=said):
        fxguard.error_budget(model, torch.randn(4, 32), **options)


def test_records(tmp_path: Path) -> None:
    kind, x = PROGRAMS["times"]
    budget = fxguard.error_budget(kind(), x)
    assert isinstance(budget, ErrorBudget)
    table = budget.to_table()
    assert table.splitlines()[0].split("|")[1].strip() == "share"
    assert budget.to_dict()["fxguard_error_budget"] == 1
    ordered = sorted(budget.rows, key=lambda row: row.order)
    assert [row.kind for row in ordered] == ["input", "add", "exp"]
    page = tmp_path / "budget.html"
    budget.to_html(page)
    text = page.read_text("utf-8")
    assert "Where the digits went" in text
    assert "lost_digits.py" in text
    assert "amplified" in budget._repr_html_()
