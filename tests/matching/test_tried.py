"""One change of one operation behind which two programs compute the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxguard.matching import _region
from fxguard.matching.match import compare_recordings
from fxguard.recording import replay
from fxguard.recording.running import recorded
from fxguard.report.run_comparison import RunComparison

WIDTH = 16


class Program(nn.Module):
    """A projection, some function, and another projection."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(2)
        )
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x @ self.first) @ self.last


def compared(a: nn.Module, b: nn.Module) -> RunComparison:
    x = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return compare_recordings(*(recorded(each, (x,), {}, 2**30)[0] for each in (a, b)))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 4)).transpose(1, 2)


def attention(x: Tensor, *, later: int = 1, scale: float = 0.5, dim: int = -1) -> Tensor:
    q = heads(x)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(later)
    scores = (q @ q.mT * scale).masked_fill(hidden, -math.inf)
    return (scores.softmax(dim) @ q).transpose(1, 2).flatten(-2)


def grouped(x: Tensor, *, tiled: bool) -> Tensor:
    k = heads(x)[:, :2]
    k = torch.cat((k, k), 1) if tiled else k.repeat_interleave(2, 1)
    return functional.scaled_dot_product_attention(heads(x), k, k).transpose(1, 2).flatten(-2)


def rotated(x: Tensor, *, sign: int) -> Tensor:
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])

    def turned(h: Tensor) -> Tensor:
        one, two = h.chunk(2, -1)
        half = torch.cat((-two, one) if sign > 0 else (two, -one), -1)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return h * cos + half * sin

    q, k = turned(heads(x)), turned(heads(x.flip(-1)))
    return functional.scaled_dot_product_attention(q, k, heads(x)).transpose(1, 2).flatten(-2)


def norm(x: Tensor, eps: float = 1e-5, correction: int = 0) -> Tensor:
    return (x - x.mean(-1, True)) * (x.var(-1, correction=correction, keepdim=True) + eps).rsqrt()


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "activation": (functional.silu, functional.gelu, "B with silu in place of gelu"),
    "approximation": (
        lambda x: functional.gelu(x),
        lambda x: functional.gelu(x, approximate="tanh"),
        "B with approximate none in place of tanh",
    ),
    "eps of another form": (
        lambda x: functional.layer_norm(x, (WIDTH,)),
        lambda x: norm(x, 1e-3),
        "B with 1e-05 in place of 0.001",
    ),
    "biased": (
        lambda x: functional.layer_norm(x, (WIDTH,)),
        lambda x: norm(x, correction=1),
        "B with correction 0 in place of 1",
    ),
    "halves": (
        lambda x: functional.silu(x.chunk(2, -1)[0]).repeat(1, 1, 2) * x,
        lambda x: functional.silu(x.chunk(2, -1)[1]).repeat(1, 1, 2) * x,
        "B with results 1 and 2 exchanged",
    ),
    "mask": (attention, lambda x: attention(x, later=2), "B with 1 in place of 2"),
    "scale": (attention, lambda x: attention(x, scale=0.25), "B with 0.5 in place of 0.25"),
    "dimension": (attention, lambda x: attention(x, dim=1), "B with dim -1 in place of 1"),
    "grouping": (
        lambda x: grouped(x, tiled=False),
        lambda x: grouped(x, tiled=True),
        "dimensions 1 and 2",
    ),
    "sign": (
        lambda x: rotated(x, sign=1),
        lambda x: rotated(x, sign=-1),
        "B with the opposite result",
    ),
    "what B lacks": (lambda x: functional.silu(x + 1), functional.silu, "A without this add"),
    "what B has": (functional.silu, lambda x: functional.silu(x).tanh(), "B without this tanh"),
    "difference": (lambda x: x - x.flip(-1), lambda x: x.flip(-1) - x, "B with "),
    "comparison": (
        lambda x: x * (x.round() > 1),
        lambda x: x * (x.round() >= 1),
        "B with gt in place of ge",
    ),
    "order of dimensions": (
        lambda x: heads(x).transpose(1, 2).flatten(-2),
        lambda x: x.unflatten(-1, (4, 4)).mT.flatten(-2),
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_change_is_found(case: str) -> None:
    a, b, text = CASES[case]
    found = compared(Program(a), Program(b))
    assert found.outcome == "operation", found
    assert found.first is not None
    assert text in found.first.tried, found
    assert compared(Program(a), Program(a)).agrees
    assert compared(Program(b), Program(b)).agrees


def test_nothing_is_claimed_of_two_changes() -> None:
    """Behind one of them the programs do not yet compute the same."""
    found = compared(Program(attention), Program(lambda x: attention(x, later=2, scale=0.25)))
    assert found.outcome == "operation"
    assert found.first is not None
    assert found.first.tried == ""


def test_an_output_with_its_elements_in_another_order() -> None:
    """It holds what the other holds, and is another one."""

    class Turned(Program):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flip(-1)

    found = compared(Program(functional.silu), Turned(functional.silu))
    assert found.outcome == "operation"
    assert found.first is not None


def test_two_numbers_are_no_mask() -> None:
    """Statistics of two samples hold two values, as masks do."""

    def scaled(approximate: str) -> Callable[[Tensor], Tensor]:
        def between(x: Tensor) -> Tensor:
            x = functional.gelu(x[:2], approximate=approximate)
            return x / (x.abs().mean((1, 2), keepdim=True) + 1e-6)

        return between

    found = compared(Program(scaled("none")), Program(scaled("tanh")))
    assert found.first is not None
    assert found.first.tried.startswith("B with approximate none in place of tanh")


def test_kernels_that_check_no_sizes() -> None:
    """What is tried never ends the process: such kernels divide by what they are given."""

    def grouped_norm(groups: int) -> Callable[[Tensor], Tensor]:
        return lambda x: functional.group_norm(x.transpose(1, 2), groups).transpose(1, 2)

    found = compared(Program(grouped_norm(4)), Program(grouped_norm(8)))
    assert found.first is not None
    assert found.first.tried.startswith("B with group 4 in place of 8")
    other = compared(
        Program(lambda x: functional.group_norm(x, 3)),
        Program(lambda x: functional.group_norm(x * 2, 6)),
    )
    assert other.outcome == "operation"


def test_what_a_record_does_not_allow_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of a folder that would allocate more than the folder says."""

    def program(eps: float) -> Program:
        return Program(lambda x: functional.silu(x + torch.full((WIDTH,), eps)))

    x = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = (recorded(program(eps), (x,), {}, 2**30)[0] for eps in (1e-3, 1e-2))
    b.is_foreign = True
    at = next(at for at, each in enumerate(b.operations) if each.kind == "full")
    large = [2**21, WIDTH]
    b.operations[at] = dataclasses.replace(b.operations[at], args=(large, 1e-2))
    ran: list[Any] = []

    def called(overload: Any, args: Any, *more: Any) -> Any:
        ran.append(args[0])
        return replay.called(overload, args, *more)

    monkeypatch.setattr(_region, "called", called)
    assert compare_recordings(a, b).outcome == "operation"
    assert ran
    assert large not in [each for each in ran if isinstance(each, list)]


def test_values_stay_what_they_were() -> None:
    """A change that writes in place is run on copies."""

    def program(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: functional.relu(x).mul_(factor).add_(1)

    a, b = Program(program(2.0)), Program(program(3.0))
    found, again = compared(a, b), compared(a, b)
    assert found.first is not None
    assert found.first.tried.startswith("B with 2 in place of 3")
    assert found.to_dict() == again.to_dict()


def test_two_values_in_each_other_s_place() -> None:
    """As two projections whose weights were exchanged."""

    def gated(first: int) -> Callable[[Tensor], Tensor]:
        def between(x: Tensor) -> Tensor:
            gate, up = (x, x.cumsum(-1)) if first == 0 else (x.cumsum(-1), x)
            return functional.silu(gate) * (up * up)

        return between

    found = compared(Program(gated(0)), Program(gated(1)))
    assert found.first is not None
    assert found.first.tried.startswith("B with "), found
    assert "exchanged" in found.first.tried


@pytest.mark.parametrize("where", ["constant", "table"])
def test_a_number_that_was_rounded_before_it_is_read(where: str) -> None:
    """No weight leads to it, and no operation of the batch may have rounded it."""

    def scaled(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        constant = torch.tensor(0.3, dtype=dtype)

        def between(x: Tensor) -> Tensor:
            if where == "constant":
                return x * constant.float()
            return x * torch.arange(1.0, 1.0 + WIDTH).log().to(dtype).float()

        return between

    found = compared(Program(scaled(torch.float32)), Program(scaled(torch.bfloat16)))
    assert found.outcome == "precision", found
    most = found.roundings[0]
    assert most.side == "B"
    assert most.share > 0.99
    assert most.operation.source is not None
    assert "return x *" in most.operation.source.code
