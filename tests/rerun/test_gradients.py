"""A second run of a graph and its backward: the gradients of the first, measured at every edge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import KeptRun, keep
from fxguard.graph.wide_form import NotJudged
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.measure.at_hand import range_of
from fxguard.options import Options
from fxguard.rerun.edges import Gradients
from fxguard.rerun.gradients import gradients_of
from fxguard.testing.watch import as_module
from support import zoo


def kept_of(model: Any, *args: Any, **kwargs: Any) -> tuple[nn.Module, list[KeptRun]]:
    """A model whose forward and backward have run, and what its graphs left for a second run."""
    kept: list[KeptRun] = []

    def hear(run: GraphRun, outputs: Sequence[Any] | None) -> None:
        assert outputs is not None
        found = keep(run, outputs, 0, len(kept), lambda run: None)
        if found is not None:
            kept.append(found)

    module = as_module(model)
    options = Options(on_detect=lambda report: None, backward=False)
    guard = GuardedModel(module, options, Plugins(hear=hear))
    guard.install()
    try:
        zoo.loss_of(module(*args, **kwargs)).backward()
    finally:
        guard.uninstall()
    return module, kept


def edges(gradients: Gradients) -> int:
    """How many gradients were measured at operands of operations."""
    return sum(edge.range is not None for each in gradients.operations for edge in each.edges)


@pytest.mark.parametrize("name", ["t5", "cnn", "in_place", "twice", "containers"])
def test_the_second_run_has_the_gradients_of_the_first(name: str) -> None:
    """Each weight gets the range of the gradient that it got, dropout and writes included."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, False)
    model, kept = kept_of(entry.model(train=True), *args, **kwargs)
    found = [gradients_of(each) for each in kept]
    weights = dict(model.named_parameters())
    read = Counter(name for gradients in found for name in gradients.weights.values())
    checked = set()
    for gradients in found:
        for value, weight in gradients.weights.items():
            if value in gradients.totals and read[weight] == 1:  # else each graph has a part of it
                grad = weights[weight].grad
                assert grad is not None
                assert gradients.totals[value] == range_of(grad)
                checked.add(weight)
    assert len(checked) >= len(weights) - sum(count > 1 for count in read.values())
    assert sum(map(edges, found)) > 0.9 * sum(len(gradients.operations) for gradients in found)


def test_the_users_gradients_and_hooks_stay() -> None:
    """A second run touches no ``.grad``, fires no hook and draws no random number."""
    fired: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model[0].weight.register_hook(lambda gradient: fired.append("weight"))
    _, (kept,) = kept_of(model, torch.randn(2, 4))
    before = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    state = torch.get_rng_state()
    gradients_of(kept)
    assert fired == ["weight"]
    assert all(map(torch.equal, before, [w.grad for w in model.parameters()]))
    assert torch.equal(state, torch.get_rng_state())


def test_one_of_several_readers_is_to_blame() -> None:
    """Gradients are measured at each operand, and not only at the value that all of them read."""

    def forward(x: Tensor) -> Tensor:
        return x.sqrt().sum() + (x * 2).sum() + x.exp().sum()

    _, (kept,) = kept_of(forward, torch.zeros(3, requires_grad=True))
    gradients = gradients_of(kept)
    bad = {
        each.call.kind
        for each in gradients.operations
        for edge in each.edges
        if edge.range is not None and edge.range.severity
    }
    assert bad == {"sqrt"}


def test_a_body_of_a_checkpoint_is_entered() -> None:
    """Operations of a checkpointed part are seen one by one."""

    def body(x: Tensor) -> Tensor:
        return x.square().sum(-1).sqrt()

    def forward(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(body, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return result.sum()

    _, (kept,) = kept_of(forward, torch.zeros(2, 3, requires_grad=True))
    kinds = [each.call.kind for each in gradients_of(kept).operations]
    assert kinds == ["square", "sum", "sqrt", "sum"]


def test_a_backward_that_a_user_wrote_is_one_operation() -> None:
    """What stands in its forward has another backward, and is not entered."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round().sqrt()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    def forward(x: Tensor) -> Tensor:
        made: Tensor = Straight.apply(x)  # type: ignore[no-untyped-call]
        return made.sum()

    _, (kept,) = kept_of(forward, torch.zeros(3, requires_grad=True))
    gradients = gradients_of(kept)
    assert [each.call.kind for each in gradients.operations] == ["Straight", "sum"]
    assert gradients.operations[0].edges[0].range is not None
    assert gradients.operations[0].edges[0].range.abs_max == 2


def test_autocast_is_that_of_the_forward() -> None:
    """The second run casts as the first one did, though autocast is over in the backward."""
    linear = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, linear.weight).float().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (kept,) = kept_of(forward, torch.randn(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    gradients = gradients_of(kept)
    (total,) = (gradients.totals[value] for value in gradients.arguments.values())
    assert total == range_of(linear.weight.grad)  # type: ignore[arg-type]
    assert not torch.is_autocast_enabled("cpu")


def test_an_input_that_was_written_since_is_not_run_on() -> None:
    """Numbers of another input would be those of another backward."""
    x = torch.randn(3, requires_grad=True)
    _, (kept,) = kept_of(lambda x: x.exp().sum(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(NotJudged, match="written since"):
        gradients_of(kept)


def test_nothing_is_kept_without_gradients() -> None:
    """A model that runs for evaluation leaves nothing behind."""
    kept: list[KeptRun | None] = []
    model = nn.Linear(2, 2)
    plugins = Plugins(hear=lambda run, outputs: kept.append(keep(run, outputs or (), 0, 0, print)))
    GuardedModel(model, Options(), plugins).install()
    with torch.no_grad():
        model(torch.randn(1, 2))
    assert kept == [None]
