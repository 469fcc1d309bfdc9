"""coverage() counts what is checked and what is not; selftest() proves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.graph import higher_order
from fxguard.guard import selftest
from fxguard.measure.ways import TRACEABLE
from support import zoo
from support.models import Block, Checkpointed
from support.same_results import assert_same, results

pytestmark = pytest.mark.slow_unless_campaign


def test_a_model_that_is_entered_whole_says_so() -> None:
    """Both operations, in one graph."""
    model = fxguard.instrument(Block())
    model(torch.randn(3, 4))
    assert fxguard.guard_of(model).coverage() == "checked 2 of 2 operations in 1 graph"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_body_that_is_not_entered_is_counted(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told, what leaves the body is checked, and the whole is blamed."""
    monkeypatch.setattr(higher_order, "ENTERED", {})
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Checkpointed(), on_detect=reports.append)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(3, 4))
    assert fxguard.guard_of(model).coverage() == (
        "checked 3 of 5 operations in 1 graph; not checked: 2 inside tag_activation_checkpoint"
    )
    assert not reports
    compiled(torch.full((3, 4), 1e4) * torch.sign(model.block.linear.weight.sum(0)))
    assert reports[0].origins[0].what == "tag_activation_checkpoint"


def test_a_body_with_arguments_that_nobody_expected_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: Any) -> list[Any]:
        raise LookupError("3 operands for 4 inputs")

    monkeypatch.setattr(higher_order.RunsOnce, "bodies", unexpected)
    model = fxguard.instrument(Checkpointed())
    model(torch.randn(3, 4))
    assert (
        fxguard.guard_of(model)
        .coverage()
        .endswith("not checked: 2 inside tag_activation_checkpoint (3 operands for 4 inputs)")
    )


def test_graph_breaks_are_counted_with_their_reasons() -> None:
    """Once for each break, not for each call; a model in one graph has none to tell."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            torch._dynamo.graph_break()
            return y * y.sum().item()

    model = fxguard.instrument(Broken())
    for _ in range(3):
        model(torch.ones(3))
    coverage = fxguard.guard_of(model).coverage()
    assert coverage.startswith("checked 3 of 3 operations in ")
    assert "; 2 graph breaks: Call to `torch._dynamo.graph_break()`, " in coverage
    assert "Tensor.item()" in coverage
    other = fxguard.instrument(Block())
    other(torch.randn(3, 4))
    assert fxguard.guard_of(other).coverage() == "checked 2 of 2 operations in 1 graph"


# The self-test.

# A NaN that is cast to an index; caches without a token.
LEFT_OUT = {
    "t5": {"that make the model raise"},
    "llama": {"that are empty"},
    "gpt2": {"that are empty"},
    "mixtral": {"that are empty"},
}
LONG = [
    pytest.param(name, marks=pytest.mark.campaign)
    for name in ("t5", "llama", "gpt2", "bert", "mixtral", "vit", "whisper")
]
TESTED = ["resnet", "cnn", "in_place", *LONG]


@pytest.mark.parametrize("name", TESTED)
def test_every_planted_nan_is_found(name: str, device: torch.device) -> None:
    """As many as coverage() says are checked, weights and integers aside; nothing is left over."""
    entry = zoo.ZOO[name].on(device)
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    model = fxguard.instrument(entry.model())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = results(model, (args, kwargs), train=False)
    guard = fxguard.guard_of(model)
    with torch.no_grad():
        result = guard.selftest()
        assert result
        assert not result.missed
        checked = int(guard.coverage().split()[1])
        left_out = dict(result.left_out)
        assert result.planted + sum(left_out.values()) >= checked
        assert left_out.keys() <= LEFT_OUT.get(name, set())
        assert guard.batch_number == 1
    assert_same(expected, results(model, (args, kwargs), train=False))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Under Inductor, on each change: `test_found_in_a_body_under_inductor`.
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.campaign])],
)
def test_the_self_test_runs_under_the_active_backend(backend: str, device: torch.device) -> None:
    entry = zoo.ZOO["bert"].on(device)
    args, kwargs = entry.inputs(torch.float32, True)
    model = fxguard.instrument(entry.model())
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    assert str(fxguard.guard_of(model).selftest()) == "found 40 of 40 planted NaN in 1 graph"


def test_the_self_test_enters_bodies() -> None:
    model = fxguard.instrument(Checkpointed())
    model(torch.randn(3, 4))
    assert str(fxguard.guard_of(model).selftest()) == "found 5 of 5 planted NaN in 1 graph"


def test_the_self_test_finds_a_check_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that looks away is named."""
    measured = TRACEABLE.abs_min_max

    def blind(value: Any) -> Any:
        low, high = measured(value)
        return low, torch.nan_to_num(high)

    model = fxguard.instrument(Block())
    model(torch.randn(3, 4))
    monkeypatch.setattr(selftest, "TRACEABLE", replace(TRACEABLE, abs_min_max=blind))
    result = fxguard.guard_of(model).selftest()
    assert not result
    assert "exp" in result.missed
    assert str(result) == "found 0 of 3 planted NaN in 1 graph; missed: input x, linear linear, exp"


def test_the_self_test_says_what_it_cannot_test() -> None:
    """Nothing before the first batch; operations between graphs are no planted ones."""
    model = fxguard.instrument(zoo.ZOO["lstm"].model())
    with pytest.raises(fxguard.FxguardError, match="no batch has finished yet"):
        fxguard.guard_of(model).selftest()
    args, kwargs = zoo.ZOO["lstm"].inputs(torch.float32, False)
    with torch.compiler.set_stance("force_eager"):
        model(*args, **kwargs)
    result = fxguard.guard_of(model).selftest()
    assert not result
    assert "between graphs" in str(result)


def test_before_the_first_batch_nothing_is_claimed() -> None:
    """Coverage says that nothing was checked yet; afterwards it counts."""
    model = fxguard.instrument(Block())
    guard = fxguard.guard_of(model)
    assert guard.coverage() == "no batch has finished yet: nothing was checked"
    assert fxguard.backend().coverage() == "no batch has finished yet: nothing was checked"
    model(torch.ones(1, 4))
    assert guard.coverage() == "checked 2 of 2 operations in 1 graph"
