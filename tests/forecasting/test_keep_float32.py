"""Operations that are kept in float32: what they give, in every way a model runs."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F  # noqa: N812

import fxguard
from fxguard.capture import float32_weights
from fxguard.errors import FxguardError
from fxguard.measure import free_memory
from support.masks import Function
from support.residual import X, residual
from support.torchrun import torchrun

KEPT = ["layers.*:linear", ":add", "norm:*"]

WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "whole": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "around": lambda model: torch.compile(
        lambda x: model(x) * 1, backend="aot_eager", fullgraph=True
    ),
    "instrumented": lambda model: fxguard.instrument(model),
    "instrumented and compiled": lambda model: torch.compile(
        fxguard.instrument(model), backend="aot_eager"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_float16_gives_what_it_gives_in_float32(way: str) -> None:
    model = residual()
    wanted = model(X)
    low = copy.deepcopy(model).half()
    assert not low(X.half()).isfinite().all()
    run = WAYS[way](fxguard.keep_float32(low, KEPT))
    found = run(X.half())
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)
    found.float().pow(2).sum().backward()
    assert {p.grad.dtype for p in low.parameters() if p.grad is not None} == {torch.float16}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_weights_are_cast_again_when_an_optimizer_has_changed_them(way: str) -> None:
    model = fxguard.keep_float32(residual().half(), KEPT)
    run = WAYS[way](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        run(X.half()).float()[0, 0].backward()
        optimizer.step()
        fresh = fxguard.keep_float32(fxguard.remove(copy.deepcopy(model)), KEPT)
        assert torch.equal(run(X.half()), fresh(X.half()))


def test_a_write_through_data_is_seen_after_a_backward() -> None:
    """Optimizers of others write so, and leave the version of a weight as it was."""
    model = fxguard.keep_float32(nn.Linear(4, 4).half(), [":linear"])
    x = torch.ones(2, 4).half()
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert not model(x).any()


def test_an_average_of_weights_is_swapped_in_and_out() -> None:
    """As for an evaluation between two training steps, through ``.data``."""
    model = fxguard.keep_float32(nn.Linear(4, 4).half(), [":linear"])
    x = torch.ones(2, 4).half()
    wanted = model(x)
    own = model.weight.detach().clone()
    model.weight.data.zero_()
    with torch.no_grad():
        assert torch.equal(model(x), model.bias.expand(2, 4))
    model.weight.data.copy_(own)
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("way", ["eager", "compiled", "whole"])
def test_under_autocast(way: str) -> None:
    model = residual()
    wanted = model(X)
    run = WAYS[way](fxguard.keep_float32(copy.deepcopy(model), KEPT))
    with torch.autocast("cpu", torch.float16):
        assert not model(X).isfinite().all()
        found = run(X)
    torch.testing.assert_close(found, wanted)


def test_autocast_inside_of_the_model() -> None:
    model = residual()
    wanted = model(X)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.model(x)

    inside = fxguard.keep_float32(Inside(), ["model.layers.*:linear", "model:add"])
    torch.testing.assert_close(inside(X), wanted)


def test_with_a_grad_scaler() -> None:
    model = fxguard.keep_float32(residual(), KEPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.float16):
        loss = model(X).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**8  # no step was skipped
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# Rewriting.

BIG = torch.full((4,), 300.0)


def clamped(x: Tensor) -> Tensor:
    return (x * x).clamp(-65504.0, 65504.0) / 1e3


def clamped_by_tensors(x: Tensor) -> Tensor:
    y = x * x
    limit = torch.where(torch.isinf(y).any(), 64504.0, 65504.0)
    return y.clamp(min=-limit, max=limit) / 1e3


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y *= x
    y[0] = 1.0
    return y / 1e3


def written_through_a_view(x: Tensor) -> Tensor:
    y = x * x
    y.view(2, 2)[0] /= 2
    return y / 1e3


def of_two(x: Tensor) -> Tensor:
    low, high = torch.split(x * x, 2)
    return (low + high) / 1e3


def cast(x: Tensor) -> Tensor:
    return ((x * x).to(x.dtype).half().type_as(x).contiguous().view(2, 2) / 1e3).view(4)


def moved(x: Tensor) -> Tensor:
    return ((x * x).view(2, 2).t().unsqueeze(0) / 1e3).flatten()


def made(x: Tensor) -> Tensor:
    return (torch.full((4,), 9e4, dtype=x.dtype) + torch.zeros_like(x)) / 1e3 + x * 0


REWRITTEN: list[tuple[Callable[[Tensor], Tensor], list[str]]] = [
    (clamped, [":mul", ":clamp", ":div"]),
    (clamped_by_tensors, [":mul", ":clamp", ":div"]),
    (written, [":mul_", ":div"]),
    (written_through_a_view, [":mul", ":div"]),
    (of_two, [":mul", ":split", ":add", ":div"]),
    (cast, [":mul", ":div"]),
    (moved, [":mul", ":div"]),
    (made, [":full", ":add#1", ":div"]),
]


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("function", "kept"), REWRITTEN, ids=[function.__name__ for function, _ in REWRITTEN]
)
def test_what_goes_with_kept_values(
    function: Callable[[Tensor], Tensor], kept: list[str], backend: str
) -> None:
    model: Any = fxguard.keep_float32(Function(function), kept)
    if backend != "eager":
        model = torch.compile(model, backend=backend)
    found = model(BIG.half())
    in_low = (clamped, clamped_by_tensors, cast)
    wanted = BIG * BIG / 1e3 if function in in_low else function(BIG)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted.half())


def test_others_have_a_clamped_value_within_its_bounds() -> None:
    """What hides an overflow is lifted for kept operations only."""
    model = fxguard.keep_float32(
        Function(
            lambda x: ((x * x).clamp(-65504.0, 65504.0), (x * x).clamp(-65504.0, 65504.0) / 4)
        ),
        [":mul", ":clamp", ":div"],
    )
    clamped, quarter = model(BIG.half())
    assert torch.equal(clamped, torch.full((4,), 65504.0).half())
    assert torch.equal(quarter, torch.full((4,), 22500.0).half())


def test_a_sum_in_float64_stays_one() -> None:
    """Only float16 and bfloat16 among the arguments of an operation become float32."""
    model = fxguard.keep_float32(
        Function(lambda x: (x * x).sum(dtype=torch.float64)), [":mul", ":sum"]
    )
    wanted = torch.tensor(4 * 300.0**2, dtype=torch.float64)
    torch.testing.assert_close(model(BIG.half()), wanted, rtol=0, atol=0)


def test_an_input_that_is_written_holds_what_was_computed() -> None:
    x = torch.full((4,), 200.0).half()
    model = fxguard.keep_float32(Function(lambda y: y.mul_(2.0)), [":mul_"])
    found = model(x)
    assert torch.equal(found, torch.full((4,), 400.0).half())
    assert torch.equal(x, found)


def test_running_statistics_are_updated() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3).half()
    kept = fxguard.keep_float32(copy.deepcopy(plain), ["*"])
    x = torch.randn(8, 3).half()
    plain(x), kept(x)
    torch.testing.assert_close(kept.running_mean, plain.running_mean)
    torch.testing.assert_close(kept.running_var, plain.running_var, rtol=2e-3, atol=2e-3)


def test_dropout_draws_what_it_draws_without() -> None:
    x = torch.ones(64).half()
    model = Function(lambda x: F.dropout(x, 0.5) * 2)
    torch.manual_seed(0)
    wanted = model(x)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(fxguard.keep_float32(model, [":dropout"])(x), wanted)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_second_of_two_is_meant() -> None:
    def twice(x: Tensor) -> Tensor:
        return (x * x / 1e4) * 1e5 / 1e5

    x = torch.full((4,), 200.0).half()  # 40000, 4, 4e5
    first = fxguard.keep_float32(Function(twice), [":mul#1"])
    assert not first(x).isfinite().all()
    second = fxguard.keep_float32(Function(twice), [":mul#2", ":div#2"])
    torch.testing.assert_close(second(x), torch.full((4,), 4.0).half())


def test_the_checks_see_the_graph_that_runs() -> None:
    model = fxguard.instrument(fxguard.keep_float32(residual().half(), KEPT))
    model(X.half())
    rows = {f.name: f.rows[-1] for f in fxguard.guard_of(model).frames() if f.kind == "pow"}
    assert rows["norm"].abs_max > 65504
    assert fxguard.guard_of(model).selftest()


# Who asks for it, and how.


def test_what_names_nothing_is_an_error_when_the_model_runs() -> None:
    model = fxguard.keep_float32(nn.Linear(2, 2), ["encoder:linear"])
    with pytest.raises(FxguardError, match=r"encoder:linear names no operation"):
        model(torch.ones(1, 2))


def test_so_it_is_in_a_graph_around_the_model() -> None:
    model = fxguard.keep_float32(nn.Linear(2, 2), ["encoder:linear"])
    around = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"names no operation"):
        around(torch.ones(1, 2))


def test_one_glob_of_two_that_names_nothing_is_warned_of() -> None:
    model = fxguard.keep_float32(nn.Linear(2, 2), [":linear", ":softmax"])
    with pytest.warns(RuntimeWarning, match=":softmax names no operation"):
        model(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2))


def test_no_glob_is_an_error() -> None:
    with pytest.raises(FxguardError, match="at least one"):
        fxguard.keep_float32(nn.Linear(2, 2), [])


def test_what_runs_other_graphs_is_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)

    model = fxguard.keep_float32(Checkpointed(), ["linear:linear"])
    with pytest.raises(Exception, match="cannot be kept in float32"):
        model(torch.ones(1, 2))


def test_a_later_call_replaces_an_earlier_one() -> None:
    model = fxguard.keep_float32(residual().half(), [":add"])
    assert not model(X.half()).isfinite().all()
    assert fxguard.keep_float32(model, KEPT)(X.half()).isfinite().all()


def test_remove_takes_it_off() -> None:
    model = residual().half()
    before = set(model.__dict__)
    wanted = model(X.half())
    fxguard.keep_float32(model, KEPT)(X.half())
    fxguard.remove(model)
    assert set(model.__dict__) == before
    torch.testing.assert_close(model(X.half()), wanted, equal_nan=True)
    with pytest.raises(FxguardError):
        fxguard.remove(model)


def test_the_guard_comes_off_first() -> None:
    for model in (
        fxguard.instrument(fxguard.keep_float32(residual().half(), KEPT)),
        fxguard.keep_float32(fxguard.instrument(residual().half()), KEPT),
    ):
        assert fxguard.remove(model)(X.half()).isfinite().all()
        with pytest.raises(FxguardError, match="not instrumented"):
            fxguard.guard_of(model)
        assert not fxguard.remove(model)(X.half()).isfinite().all()


def traced() -> nn.Module:
    return symbolic_trace(residual())  # torch makes a copy of it from its graph


@pytest.mark.parametrize(("make", "kept"), [(residual, KEPT), (traced, ["*"])])
def test_a_copy_keeps_what_its_original_keeps(
    make: Callable[[], nn.Module], kept: list[str]
) -> None:
    """Also under a guard, and after the guard of the copy is removed."""
    model = fxguard.keep_float32(make().half(), kept)
    wanted = model(X.half())
    assert torch.equal(copy.deepcopy(model)(X.half()), wanted)
    twin = copy.deepcopy(fxguard.instrument(model))
    assert torch.equal(twin(X.half()), wanted)
    assert torch.equal(fxguard.remove(twin)(X.half()), wanted)
    assert not fxguard.remove(twin)(X.half()).isfinite().all()


class Packs(nn.Module):
    """A class that says itself what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = residual()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)

    def __reduce__(self) -> Any:
        return Packs, ()


def through_torch(model: nn.Module) -> Any:
    return torch.save(model, io.BytesIO())


@pytest.mark.sampled
@pytest.mark.parametrize("through", [pickle.dumps, through_torch])
@pytest.mark.parametrize(
    "model",
    [
        lambda: fxguard.keep_float32(residual().half(), KEPT),
        lambda: fxguard.instrument(fxguard.keep_float32(residual().half(), KEPT)),
        lambda: fxguard.keep_float32(fxguard.instrument(residual().half()), KEPT),
        lambda: nn.Sequential(fxguard.keep_float32(residual().half(), KEPT)),
        lambda: fxguard.keep_float32(symbolic_trace(nn.Sequential(nn.GELU())), ["*"]),
        lambda: fxguard.keep_float32(Packs().half(), ["*"]),
    ],
)
def test_a_pickle_cannot_keep_it(through: Callable[[Any], Any], model: Any) -> None:
    """A loaded model that overflows again would be worse than an error, which says what to do."""
    kept = model()
    before = kept(X.half())
    with pytest.raises(FxguardError, match=r"state_dict.*remove.*keep_float32 on the loaded"):
        through(kept)
    assert torch.equal(kept(X.half()), before)


def test_without_it_the_model_is_pickled_and_its_state_always() -> None:
    """After `remove`, or as a state that is loaded into a model with the same kept operations."""
    kept = fxguard.keep_float32(residual().half(), KEPT)
    wanted = kept(X.half())
    state = pickle.loads(pickle.dumps(kept.state_dict()))
    other = fxguard.keep_float32(residual().half(), KEPT)
    other.load_state_dict(state)
    assert torch.equal(other(X.half()), wanted)
    loaded = pickle.loads(pickle.dumps(fxguard.remove(kept)))
    assert not any(name.startswith("_fxguard") for name in loaded.__dict__)
    assert torch.equal(fxguard.keep_float32(loaded, KEPT)(X.half()), wanted)


def test_another_shape_and_mode_are_kept_too() -> None:
    model = fxguard.keep_float32(residual().half(), KEPT)
    for rows in (4, 3, 2):
        assert model(X[:rows].half()).isfinite().all()
    with torch.inference_mode():
        assert model.eval()(X.half()).isfinite().all()


def test_a_script_that_is_watched_keeps_it_too() -> None:
    model = fxguard.keep_float32(residual().half(), KEPT)
    with fxguard.watch(model):
        found = model(X.half())
    assert found.isfinite().all()
    assert torch.equal(model(X.half()), found)
    fxguard.remove(model)
    assert not model(X.half()).isfinite().all()


def test_a_kept_part_of_an_instrumented_model() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = fxguard.keep_float32(residual().half(), KEPT)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) * 1

    model = Outer()
    wanted = model(X.half())
    assert wanted.isfinite().all()
    assert torch.equal(fxguard.instrument(model)(X.half()), wanted)
    assert torch.equal(fxguard.remove(model)(X.half()), wanted)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(X.half()), wanted)
    model = fxguard.keep_float32(Outer(), [":mul"])
    assert torch.equal(model(X.half()), wanted)


RANKS = """
import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import fxguard
from support.residual import X, residual
from support.torchrun import torchrun

distributed.init_process_group("gloo")
rank = distributed.get_rank()
model = fxguard.keep_float32(residual().half(), ["layers.*:linear", ":add", "norm:*"])
wrapped = nn.parallel.DistributedDataParallel(model) if "ddp" in sys.argv else fully_shard(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    loss = wrapped(X[rank * 2 : rank * 2 + 2].half()).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    assert loss.isfinite(), loss
if "ddp" in sys.argv:  # one process that sees both halves does the same
    alone = fxguard.keep_float32(residual().half(), ["layers.*:linear", ":add", "norm:*"])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        alone(X.half()).float().pow(2).mean().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)
print("rank", rank, "is done")
distributed.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)
@pytest.mark.parametrize(
    "wrapper",
    [pytest.param("ddp", marks=pytest.mark.campaign), pytest.param("fsdp", marks=pytest.mark.slow)],
)
def test_on_two_ranks(wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    script = tmp_path / "train.py"
    script.write_text(RANKS, encoding="utf-8")
    ran = torchrun(script, wrapper)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("is done") == 2


@pytest.mark.parametrize(("free", "copies"), [(2**40, 1), (2**10, 0)])
def test_weights_are_copied_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, free: int, copies: int
) -> None:
    """Elsewhere they are cast at each run, and give the same."""
    made = []
    copied = float32_weights._Copy.__init__

    def counted(self: Any, weight: Tensor) -> None:
        made.append(weight)
        copied(self, weight)

    monkeypatch.setattr(float32_weights._Copy, "__init__", counted)
    monkeypatch.setattr(free_memory, "SMALL", 0)
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: free)
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    x = torch.randn(4, 32)
    kept = fxguard.keep_float32(copy.deepcopy(model).half(), [":linear"])
    wanted = nn.functional.linear(x.half().float(), model.weight.half().float()).half()
    for _ in range(2):
        torch.testing.assert_close(kept(x.half()), wanted, rtol=0, atol=0)
    assert len(made) == copies
    kept(x.half()).sum().backward()
    assert kept.weight.grad is not None
    assert kept.weight.grad.dtype is torch.float16
