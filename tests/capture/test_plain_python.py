"""An eager model behaves as in plain Python; a compiled one as its compiler made it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxguard
from fxguard.guard.guard import GuardedModel
from support.needs import TORCH, needs

X = torch.ones(2, 8)


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).relu()


def pair() -> tuple[nn.Module, nn.Module]:
    """The plain model and a guarded copy of it, each after one batch."""
    plain = Unit()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    plain(X), guarded(X)
    return plain, guarded


# Hooks.


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def halved(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / 2,)


def negated(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return -output


def with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output + 1


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.a.register_forward_hook(doubled),
    "forward with keywords": lambda m: m.a.register_forward_hook(with_kwargs, with_kwargs=True),
    "pre": lambda m: m.a.register_forward_pre_hook(halved),
    "of the root": lambda m: m.register_forward_hook(doubled),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_come_and_go_between_batches(kind: str) -> None:
    """A hook that is added, replaced or removed after the first batch counts from the next on."""
    plain, guarded = pair()
    handles = [HOOKS[kind](model) for model in (plain, guarded)]
    assert not torch.equal(plain(X), Unit()(X)), "the hook does something"
    assert torch.equal(plain(X), guarded(X))
    for handle in handles:
        handle.remove()
    again = [model.a.register_forward_hook(negated) for model in (plain, guarded)]
    assert torch.equal(plain(X), guarded(X))
    for handle in again:
        handle.remove()
    assert torch.equal(guarded(X), Unit()(X))


def test_hooks_that_come_back_are_not_captured_again() -> None:
    """A state of the hooks is captured once, and too many states are left to Python."""
    model = fxguard.instrument(Unit())
    for _ in range(4):
        model(X)
        with model.a.register_forward_hook(doubled):
            for _ in range(2):
                assert torch.equal(model(X), Unit()(X) * 2)
    # Each hook is a new one: that is five states.
    assert fxguard.guard_of(model).coverage().startswith("checked 14 of 14 operations in 5 graphs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxguard.install.captures.MOST_CAPTURES", 5)
        with model.a.register_forward_hook(doubled):
            assert torch.equal(model(X), Unit()(X) * 2)
            with pytest.raises(fxguard.NonFiniteError):
                model(X * math.nan)
    assert "between graphs" in fxguard.guard_of(model).coverage()


def test_hooks_that_are_new_at_each_call_are_left_to_python() -> None:
    """As where a trainer adds one in each step: a capture would take longer than the step."""
    model, plain = fxguard.instrument(Unit()), Unit()
    for _ in range(12):
        for each in (model, plain):
            each.a.register_forward_hook(doubled)
        assert torch.equal(model(X), plain(X))
    captured = fxguard.guard_of(model).coverage()
    assert " in 3 graphs" in captured
    with pytest.raises(fxguard.NonFiniteError):
        model(X * math.nan)
    for _ in range(3):  # these stay, and are captured
        assert torch.equal(model(X), plain(X))
    assert " in 4 graphs" in fxguard.guard_of(model).coverage()


def test_hooks_on_all_modules_count_too() -> None:
    """A hook for every module of the process, added after the first batch, changes the output."""
    plain, guarded = pair()
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: out + 1)
    try:
        assert torch.equal(plain(X), guarded(X))
        assert not torch.equal(plain(X), X)
    finally:
        hook.remove()
    assert torch.equal(guarded(X), Unit()(X))


def test_backward_hooks_count_too() -> None:
    """A full backward hook that is added after the first batch changes the gradient."""
    plain, guarded = pair()
    grads = []
    for model in (plain, guarded):
        model.a.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    x = X.clone().requires_grad_()
    Unit()(x).sum().backward()
    assert torch.equal(grads[0], x.grad * 2)


# The path that the model takes.


def test_an_eager_model_is_not_told_that_it_is_compiled() -> None:
    """`torch.compiler.is_compiling()` is False in an eager model, and True in a compiled one."""

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if torch.compiler.is_compiling() else x + 2

    model = fxguard.instrument(Asks())
    assert torch.equal(model(X), X + 2)
    assert torch.equal(torch.compile(model, backend="eager")(X), X + 1)
    assert torch.equal(model(X), X + 2)
    fxguard.remove(model)
    assert torch.equal(torch.compile(model, backend="eager")(X), X + 1)


def test_transformers_builds_no_mask_where_plain_python_builds_none() -> None:
    """Llama with a mask of ones runs with `is_causal=True`, as in plain eager mode."""
    transformers = needs("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    ids = torch.arange(16)[None]
    for options in ({}, {"attention_mask": torch.ones_like(ids)}):
        assert torch.equal(plain(ids, **options).logits, guarded(ids, **options).logits)
        attention = next(
            frame for frame in fxguard.guard_of(guarded).frames() if frame.kind.startswith("scaled")
        )
        assert not any("mask" in row.label for row in attention.rows)
        assert len([row for row in attention.rows if row.label.startswith("input")]) == 3


def test_a_static_cache_is_captured_with_the_bits_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first call marks addresses as static, which only code does that is not compiled, and
    each call waits for a kernel that may not exist."""
    monkeypatch.setattr(GuardedModel, "fallback", True)
    transformers = needs("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaModel(config).eval()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    caches = [transformers.StaticCache(config=config, max_cache_len=16) for _ in range(2)]
    ids = torch.arange(6)[None]
    for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
        outputs = [
            model(part, past_key_values=cache, use_cache=True).last_hidden_state
            for model, cache in zip((plain, guarded), caches, strict=True)
        ]
        assert torch.equal(*outputs)
        coverage = fxguard.guard_of(guarded).coverage()
        assert "between graphs" not in coverage
        assert "not checked" not in coverage
    for expected, found in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(found.keys, expected.keys)
        assert found.keys._dynamo_static_input_type == expected.keys._dynamo_static_input_type
    assert not any("static" in frame.kind for frame in fxguard.guard_of(guarded).frames())


def test_a_function_that_must_not_be_traced_ends_the_graph() -> None:
    """Python calls it, with the tensor itself."""

    class Marks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            torch._dynamo.maybe_mark_dynamic(x, 0)
            return torch.full_like(x, len(x._dynamo_weak_dynamic_indices))

    guarded = fxguard.instrument(Marks())
    assert torch.equal(guarded(X), torch.ones(2, 8))
    assert "call of maybe_mark_dynamic" in fxguard.guard_of(guarded).coverage()


def test_what_torchdynamo_cannot_trace_runs_as_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral in float32 takes `grouped_mm` in eager mode, which has no fake result: it is checked
    between graphs, and its bits are those of plain Python."""
    monkeypatch.setattr(GuardedModel, "fallback", True)
    transformers = needs("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    torch.manual_seed(0)
    plain = transformers.MixtralForCausalLM(config).eval()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    ids = torch.arange(8)[None]
    assert torch.equal(plain(ids).logits, guarded(ids).logits)
    coverage = fxguard.guard_of(guarded).coverage()
    assert "between graphs" in coverage or TORCH >= (2, 15)  # which traces `grouped_mm`
    assert "not checked" not in coverage
    assert any("grouped_mm" in frame.kind for frame in fxguard.guard_of(guarded).frames())


def test_methods_of_tensors_that_are_written_in_python_break_no_graph() -> None:
    """`unflatten` is one of the graph's operations, as for TorchDynamo alone."""

    class Splits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unflatten(-1, (2, 4)) * 2

    model = fxguard.instrument(Splits())
    assert model(X).shape == (2, 2, 4)
    assert fxguard.guard_of(model).coverage() == "checked 1 of 1 operations in 1 graph"


def test_a_mode_of_the_user_still_sees_every_operation() -> None:
    """The observer alone is left out of the trace: other function modes act as without fxguard."""

    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.relu or func is Tensor.relu else result

    plain, guarded = pair()
    with Doubles():
        expected = plain(X)
        assert torch.equal(guarded(X), expected)
    assert not torch.equal(plain(X), expected)
    assert torch.equal(plain(X), guarded(X))


def test_an_exception_that_nobody_catches_is_raised() -> None:
    """Without a `try` block the same failure is raised from the guarded model as from the plain."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x * 1)

    bad = -torch.eye(3)
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        Fails()(bad)
    with pytest.raises(torch.linalg.LinAlgError) as found:
        fxguard.instrument(Fails())(bad)
    assert str(found.value) == str(expected.value)


def settings() -> tuple[Any, ...]:
    """What ``with`` blocks of torch change."""
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    backends = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), nesting, backends


BLOCKS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "attention kernels": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_an_exception_in_a_with_block_leaves_torch_as_it_was(block: str) -> None:
    """Grad mode, autocast and the kernels of attention are set back, as Python sets them back."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with BLOCKS[block]():
                return torch.linalg.cholesky(x * 1)

    before = settings()
    model = fxguard.instrument(Fails())
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            model(-torch.eye(3))
        assert settings() == before
    assert torch.equal(model(torch.eye(3)), torch.eye(3))


def test_fused_attention_is_taken_where_python_takes_it() -> None:
    """`nn.MultiheadAttention` in evaluation gives the bits of its fused kernel."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert torch.equal(plain(x, x, x)[0], guarded(x, x, x)[0])
    steps = [step.kind for plan in fxguard.guard_of(guarded).plans for step in plan.steps]
    assert steps == ["_native_multi_head_attention"]


def test_what_python_did_before_a_graph_raised_is_lost() -> None:
    """docs/limitations.md: side effects of Python are made up for when the graph has returned."""
    seen = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append("before")
            return torch.linalg.cholesky(x * 1)

    with pytest.raises(torch.linalg.LinAlgError):
        Fails()(-torch.eye(3))
    assert seen == ["before"]
    with pytest.raises(torch.linalg.LinAlgError):
        fxguard.instrument(Fails())(-torch.eye(3))
    assert seen == ["before"]


# What cannot be checked is said.


class Yields(Unit):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        yield self.a(x)


class Awaits(Unit):
    async def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@pytest.mark.parametrize("kind", [Yields, Awaits])
def test_a_forward_that_runs_later_is_not_checked_and_said_to_be_so(kind: type[Unit]) -> None:
    """A generator or coroutine works as without fxguard, and `coverage()` names it."""
    model = fxguard.instrument(kind())
    result = model(X)
    if kind is Yields:
        assert torch.equal(next(result), model.a(X))
    else:
        with pytest.raises(StopIteration) as end:
            result.send(None)
        assert torch.equal(end.value.value, model.a(X))
    word = "generator" if kind is Yields else "coroutine"
    assert f"not checked: 1 call whose forward is a {word}" in fxguard.guard_of(model).coverage()


def test_fake_tensors_pass_through_and_are_counted() -> None:
    """Under FakeTensorMode, and with fake inputs, the model runs as it is."""
    model = fxguard.instrument(Unit())
    model(X)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(torch.ones(4, 8)).shape == (4, 8)
        fake = copy.deepcopy(Unit())
    guarded = fxguard.instrument(fake)
    assert guarded(mode.from_tensor(X)).shape == (2, 8)
    assert "not checked: 1 call with fake tensors" in fxguard.guard_of(model).coverage()
    assert "not checked: 1 call with fake tensors" in fxguard.guard_of(guarded).coverage()
    with pytest.raises(fxguard.NonFiniteError):
        model(X * math.nan)


# torch.func around the model.


def test_vmap_around_a_guarded_model_is_checked() -> None:
    """A -inf mask under `vmap` is healthy; NaN under `vmap` and `grad` is found."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x + mask).softmax(-1)

    mask = torch.tensor([0.0, -math.inf]).expand(2, 2)
    ones = torch.ones(2, 2)
    expected = torch.vmap(Masked())(ones, mask)
    assert torch.equal(torch.vmap(fxguard.instrument(Masked()))(ones, mask), expected)

    model = fxguard.instrument(Unit())
    assert torch.equal(torch.vmap(model)(X), torch.vmap(Unit())(X))
    with pytest.raises(fxguard.NonFiniteError, match="NaN"):
        torch.vmap(model)(X * math.nan)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    def plain_loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(Unit(), weights, (x,)).sum()

    found, expected = torch.func.grad(loss)(weights, X), torch.func.grad(plain_loss)(weights, X)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(fxguard.NonFiniteError, match="NaN"):
        torch.func.grad(loss)(weights, X * math.nan)


def test_an_overflow_under_vmap_is_blamed_on_the_operation() -> None:
    """The multiplication is named, and the clean samples beside it do not hide it."""

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x) + 1

    x = torch.ones(3, 2)
    x[1, 0] = 1e30
    with pytest.raises(fxguard.NonFiniteError, match="mul made inf"):
        torch.vmap(fxguard.instrument(Squares()))(x)


# What somebody else compiles or exports.


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_exports_the_plain_model(strict: bool) -> None:
    """Both ways of `torch.export` give the program of the model without the guard."""
    plain = Unit().eval()
    expected = torch.export.export(plain, (X,), strict=strict)
    found = torch.export.export(fxguard.instrument(Unit().eval()), (X,), strict=strict)
    assert found.graph_module.code == expected.graph_module.code
    assert torch.equal(found.module()(X), plain(X))


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_is_compiled_around_the_model_is_checked(fullgraph: bool, backend: str) -> None:
    """Loss and gradients are those of the plain step, and a NaN in the model is found."""
    plain, guarded = Unit(), fxguard.instrument(Unit())
    compiled = torch.compile(step, backend=backend, fullgraph=fullgraph)
    for model in (plain, guarded):
        for _ in range(2):
            compiled(model, X, torch.zeros(2, 8)).backward()
    for one, other in zip(plain.parameters(), guarded.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert fxguard.guard_of(guarded).batch_number == 2
    frames = fxguard.guard_of(guarded).frames()
    assert [frame.title for frame in frames if not frame.is_op] == ["a Linear", "Unit"]
    assert all(frame.source is not None for frame in frames if frame.is_op)
    operations = "3 of 3" if fullgraph else "2 of 2"  # the loss is part of one graph with the model
    assert f"checked {operations} operations" in fxguard.guard_of(guarded).coverage()
    bad = X.clone()
    bad[1, 3] = math.nan
    with pytest.raises(fxguard.NonFiniteError, match="NaN"):
        compiled(guarded, bad, torch.zeros(2, 8))
    with torch.no_grad():
        guarded.a.weight.fill_(3e38)
    with pytest.raises(fxguard.NonFiniteError, match=r"linear in .*a made inf"):
        compiled(guarded, X, torch.zeros(2, 8))
    fxguard.remove(guarded)
    assert not compiled(guarded, X, torch.zeros(2, 8)).isfinite()


@pytest.mark.parametrize("make", [Unit, lambda: nn.Sequential(nn.Linear(8, 8))])
def test_a_compiled_model_stays_compiled_before_during_and_after(
    make: Callable[[], nn.Module],
) -> None:
    """`torch.compile` before or after `instrument`, then `remove`: one compiled graph each time."""
    counted = torch._dynamo.testing.CompileCounter()
    model = make()
    before = torch.compile(model, backend=counted, fullgraph=True)
    before(X)
    assert counted.frame_count == 1
    fxguard.instrument(model)
    after = torch.compile(model, backend=counted, fullgraph=True)
    for compiled in (before, after):
        compiled(X)
        with pytest.raises(fxguard.NonFiniteError):
            compiled(X * math.nan)
    fxguard.remove(model)
    for compiled in (before, after):
        counted.clear()
        torch._dynamo.reset()
        assert torch.equal(compiled(X), model(X))
        assert compiled(X * math.nan).isnan().all()
        assert counted.frame_count == 1


# Forwards that are no methods written in Python.


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.log(x)


class WrittenInC(nn.Module):
    forward = torch.log


def its_own() -> nn.Module:
    model = nn.Module()
    model.forward = torch.log
    return model


@pytest.mark.parametrize("make", [Static, WrittenInC, its_own])
def test_a_forward_that_takes_no_model(make: Callable[[], nn.Module]) -> None:
    """It is called as Python calls it, checked, exported, compiled around, and can be put back."""
    model = fxguard.instrument(make())
    assert torch.equal(model(X), torch.zeros(2, 8))
    with pytest.raises(fxguard.NonFiniteError, match="log made -inf"):
        model(X - 1)
    if make is Static:  # torch.export asks the others for a signature, guarded or not
        assert torch.equal(torch.export.export(model, (X,)).module()(X), torch.zeros(2, 8))
    around = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(around(X), X)
    fxguard.remove(model)
    assert torch.equal(model(X - 1), torch.full((2, 8), -math.inf))
