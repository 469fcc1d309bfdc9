"""All that led to a loss runs again: with the same data, with others, and without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.graph.wide_form import NotJudged
from fxguard.rerun.lineage import Lineage


class Blocks(nn.Module):
    """Blocks that are captured one by one, with operations between them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
            for _ in range(layers)
        )
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks(2)

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token(self.inner(tokens), tokens)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 1),
    )


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def squared(found: Tensor, wanted: Tensor) -> Tensor:
    error = found.float() - wanted
    error *= 2
    return (error**2).mean() + 0.1 * found.abs().sum()


def tokens(seed: int) -> list[Tensor]:
    return [torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(seed))]


def numbers(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 16, generator=generator), torch.randn(6, 1, generator=generator)]


Loss = Callable[[nn.Module, list[Tensor]], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Tensor]], Loss]] = {
    "blocks": (Blocks, tokens, lambda model, given: next_token(model(given[0]), given[0])),
    "one of its own": (WithLoss, tokens, lambda model, given: model(given[0])),
    "batch norm": (normed, numbers, lambda model, given: squared(model(given[0]), given[1])),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_runs_again(case: str) -> None:
    make, data_of, loss_of = CASES[case]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    with fxguard.watch(model):
        for seed in range(3):
            given = data_of(seed)
            before = torch.get_rng_state()
            loss = loss_of(model, given)
            drawn, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
            lineage = Lineage(loss)
            assert lineage.again().item() == loss.item()
            others = data_of(seed + 10)
            found = lineage.again(_like(lineage.data, given, others))
            assert torch.equal(torch.get_rng_state(), drawn)
            for name, value in model.state_dict().items():
                assert torch.equal(value, state[name]), name
            loss.backward()
            twin.load_state_dict(state)
            torch.set_rng_state(before)
            with torch.no_grad():
                assert found.item() == pytest.approx(loss_of(twin, others).item(), rel=1e-6)


def test_with_other_weights() -> None:
    torch.manual_seed(0)
    model = Blocks()
    twin = copy.deepcopy(model)
    (given,) = tokens(0)
    with fxguard.watch(model):
        before = torch.get_rng_state()
        lineage = Lineage(next_token(model(given), given))
        weights = {id(x): torch.randn_like(x) for x in model.parameters()}
        found = lineage.again(weights=weights)
    with torch.no_grad():
        for x, y in zip(twin.parameters(), model.parameters(), strict=True):
            x.copy_(weights[id(y)])
        torch.set_rng_state(before)
        assert found.item() == pytest.approx(next_token(twin(given), given).item(), rel=1e-6)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_what_was_not_followed_is_said() -> None:
    model = fxguard.instrument(Blocks(1))
    (given,) = tokens(0)
    with pytest.raises(NotJudged, match=r"^NllLossBackward0 is made outside the model"):
        Lineage(next_token(model(given), given))
    with pytest.raises(NotJudged, match="nothing that fxguard followed"):
        Lineage(torch.zeros(1))
    with fxguard.watch(watched := Blocks(1)):
        loss = next_token(Doubled.apply(watched(given)), given)
        with pytest.raises(NotJudged, match=r"^Doubled, an autograd function of the script"):
            Lineage(loss)


def test_what_has_changed_since_is_not_run() -> None:
    with fxguard.watch(model := Blocks(1)):
        (given,) = tokens(0)
        lineage = Lineage(next_token(model(given), given))
        with torch.no_grad():
            model.head.weight.add_(1)
        with pytest.raises(NotJudged):
            lineage.again()


def test_a_backward_ends_it() -> None:
    with fxguard.watch(model := Blocks(1)):
        (given,) = tokens(0)
        loss = next_token(model(given), given)
        loss.backward()
        with pytest.raises(NotJudged):
            Lineage(loss).again()


def test_two_losses_of_one_form() -> None:
    with fxguard.watch(model := Blocks()):
        one, two = (Lineage(next_token(model(x), x)) for seed in (0, 1) for x in tokens(seed))
        assert one.form == two.form
        assert [x.shape for x in one.data] == [x.shape for x in two.data]
        three = Lineage(2 * next_token(model(tokens(2)[0]), tokens(2)[0]))
        assert three.form != one.form


def _like(data: list[Tensor], given: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Other data in the form that a lineage has: views of what was given, or masks."""
    found = []
    for each in data:
        at = [
            i
            for i, x in enumerate(given)
            if x.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()
        ]
        if at and each.shape == given[at[0]].shape:
            found.append(others[at[0]])
        elif each.dim() == 1 and each.numel() == 28:  # targets of the next token
            found.append(others[0][:, 1:].flatten())
        else:
            found.append(each)
    return found
