"""Graphs that draw random numbers under a compiler: second runs have what the first run drew.

``own_numbers`` is a compiler in small: it draws a seed, and all random numbers from that, as
Inductor does. So Python draws others from the same state of the generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.batch import draws
from fxguard.capture import _drawing
from fxguard.rerun import drawn

X = torch.linspace(0.1, 3, 64).view(4, 16)


class Compiler:
    """A compiler with random numbers of its own; it counts what it compiles."""

    def __init__(self, repeats: bool = True, most: int = 100) -> None:
        self.repeats = repeats
        self.most = most
        self.graphs: list[GraphModule] = []
        self.runs: list[int] = []  # the seed of each

    def __call__(self, graph: GraphModule, given: list[Any]) -> Callable[..., Any]:
        if len(self.graphs) == self.most:
            raise RuntimeError("the compiler gave up")
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            seed = int(torch.randint(2**60, ())) + (0 if self.repeats else len(self.runs))
            self.runs.append(seed)
            with torch.random.fork_rng([]):
                torch.manual_seed(seed + 1)
                return graph(*args)

        return run


class Net(nn.Module):
    """A dropout, and a log of what it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x).abs() + 0.1).log() * 0.5


class Seen:
    """A guarded model that has run once, what it returned, and what was reported."""

    def __init__(
        self,
        model: nn.Module,
        *args: Tensor,
        compiler: Any = None,
        calls: int = 1,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        self.reports: list[fxguard.types.Report] = []
        self.compiler = Compiler() if compiler is None else compiler
        self.model = fxguard.instrument(model, on_detect=self.reports.append, **options)
        called = torch.compile(self.model, backend=self.compiler)
        torch.manual_seed(1)
        for _ in range(calls):
            self.output = called(*args)
        self.state = torch.get_rng_state()

    @property
    def report(self) -> fxguard.types.Report:
        return self.reports[-1]

    @property
    def origin(self) -> fxguard.types.Origin:
        return self.report.origins[0]


def built(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def assert_of_this_run(origin: fxguard.types.Origin, bad: Tensor) -> None:
    """The numbers of an origin are those of the tensor that the compiled model made."""
    index = tuple(bad.isfinite().logical_not().nonzero()[0].tolist())
    assert origin.first_index == index
    counts = (origin.nan_count, origin.posinf_count, origin.neginf_count)
    is_inf = bad.isinf()
    expected = (bad.isnan(), is_inf & (bad > 0), is_inf & (bad < 0))
    assert counts == tuple(int(each.sum()) for each in expected)
    assert f"at {list(index)}: " in origin.operands


@pytest.mark.parametrize("options", [{}, {"replay": True}, {"full_every": 2}])
def test_the_operands_are_those_of_the_compiled_run(options: dict[str, Any]) -> None:
    """Cause, operands, counts and fix, in each mode; Python draws other numbers."""
    seen = Seen(built(), X, **options)
    assert seen.origin.cause == "log of zero" or seen.origin.cause_in_words == "log of zero"
    assert_of_this_run(seen.origin, seen.output.detach() * 2)
    assert seen.origin.fixes
    assert "log(0.0)" in seen.origin.operands
    assert any("eager mode agrees" in line for line in seen.report.why)
    torch.manual_seed(1)
    other = seen.model.drop(seen.model.linear(X).abs() + 0.1).log()
    assert not torch.equal(other.isinf(), seen.output.isinf()), "Python draws the same"


class Dropped(Net):
    """The same, where the dropout comes after a log of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop((self.linear(x) * 0).abs().log().exp())


def test_before_a_draw_nothing_is_compiled_again() -> None:
    seen = Seen(built(Dropped), X, strict=True)
    assert "log(0.0)" in seen.origin.operands
    assert len(seen.compiler.graphs) == 1


def test_in_evaluation_nothing_is_drawn_and_nothing_compiled_again() -> None:
    seen = Seen(built(Dropped).eval(), X, strict=True)
    assert "log(0.0)" in seen.origin.operands
    assert len(seen.compiler.graphs) == 1


class Broken(Net):
    """Two graphs, each with a dropout; the second log is of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x)).abs() + 4
        torch._dynamo.graph_break()
        return self.drop(y).log()


def test_each_graph_is_asked_for_its_own_numbers() -> None:
    seen = Seen(built(Broken), X)
    assert_of_this_run(seen.origin, seen.output.detach())
    assert "log(0.0)" in seen.origin.operands


class Noisy(nn.Module):
    """Divides by random numbers, some of which are 0."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) * 4 - 1
        return 1 / noise.clamp(min=0)


class Kept(nn.Module):
    """A mask that is drawn in place, and written again after that."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.6)
        y = x / mask
        mask.add_(1)
        return y + mask


class Attention(nn.Module):
    """Attention with a dropout inside a kernel, and the logarithm of what it makes."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.view(1, 1, 4, 16)
        made = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.9)
        return made.relu().log()


class Overwriting(Net):
    """A dropout in place, under a write to its result."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.linear(x).abs() + 0.1, 0.3, True, True)
        z = y.log()
        y.mul_(2)
        return z + y


@pytest.mark.parametrize("kind", [Noisy, Kept, Attention, Overwriting])
def test_whatever_draws(kind: type[nn.Module]) -> None:
    seen = Seen(built(kind), X)
    assert seen.origin.first_index is not None
    assert_of_this_run(seen.origin, seen.output.detach())


def test_a_low_precision_model_has_a_tried_fix() -> None:
    """The trial runs the whole graph in float32, with the numbers that were drawn."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x).square().mean(-1).sqrt()

    seen = Seen(built(Half), (X * 200).half())
    assert seen.origin.what == "square"
    assert seen.origin.cause == "overflow"
    assert any(fix.kind == "tried" for fix in seen.origin.fixes), seen.origin.fixes
    assert any("in float32 it is finite" in line for line in seen.report.why)


class Checkpointed(Net):
    """A dropout inside a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        def body(y: Tensor) -> Tensor:
            return self.drop(self.linear(y).abs() + 0.1).log()

        return checkpoint(body, x, use_reentrant=False) * 2


def test_in_a_checkpoint() -> None:
    seen = Seen(built(Checkpointed), X)
    assert_of_this_run(seen.origin, seen.output.detach())
    assert "log(0.0)" in seen.origin.operands


class Stateful(Net):
    """Running statistics, a buffer and an input that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        self.calls += 1
        cache.add_(self.norm(x).detach())
        return self.drop(cache.abs() + 0.1).log()


@pytest.mark.parametrize("options", [{}, {"replay": True}])
def test_a_second_run_leaves_no_trace(options: dict[str, Any]) -> None:
    """Outputs, buffers, an input that is written, and the random state are those of plain calls."""
    caches = [torch.ones(4, 16) for _ in range(2)]
    seen = Seen(built(Stateful), X, caches[0], calls=3, **options)
    assert len(seen.reports) == 3
    assert len(seen.compiler.graphs) == 2
    plain = built(Stateful)
    torch._dynamo.reset()
    called = torch.compile(plain, backend=Compiler())
    torch.manual_seed(1)
    for _ in range(3):
        output = called(X, caches[1])
    assert torch.equal(output, seen.output)
    assert torch.equal(torch.get_rng_state(), seen.state)
    assert torch.equal(*caches)
    for one, other in zip(
        plain.state_dict().values(), seen.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert_of_this_run(seen.origin, output.detach())


@pytest.mark.parametrize("options", [{}, {"replay": True}])
def test_numbers_that_do_not_come_again_show_no_operand(options: dict[str, Any]) -> None:
    """It is said in a sentence. The cause is that which magnitudes leave no doubt about."""
    seen = Seen(built(), X, compiler=Compiler(repeats=False), **options)
    sentence = drawn.UNLIKE
    assert sentence in str(seen.report)
    assert "log(0.0)" not in str(seen.report)
    assert seen.origin.first_index is None
    if options:
        assert not seen.origin.fixes
    else:
        assert seen.origin.what == "log"
        assert seen.origin.cause_in_words == "log of zero"
        assert seen.origin.operands == f"no elements: {sentence}"


def test_a_compiler_that_gives_up_gives_no_elements() -> None:
    seen = Seen(built(), X, compiler=Compiler(most=1))
    assert seen.origin.operands == f"no elements: {_drawing.NOT_COMPILED}"
    assert seen.origin.first_index is None


def test_a_bad_batch_compiles_once_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three bad batches: one more graph; what was drawn is let go with each batch."""
    made: list[draws.Draws] = []

    def noted(*args: Any) -> draws.Draws:
        made.append(draws.Draws(*args))
        return made[-1]

    monkeypatch.setattr("fxguard.capture.backend.Draws", noted)
    seen = Seen(built(), X, calls=3)
    assert len(seen.reports) == 3
    assert len(seen.compiler.graphs) == 2
    assert [each.found for each in made] == [None] * 3


def test_other_sizes_are_compiled_for_themselves() -> None:
    seen = Seen(built(), X)
    called = torch.compile(seen.model, backend=seen.compiler)
    for rows in (3, 2, 4):
        assert_of_this_run_after(seen, called, X[:rows])


def test_it_is_not_compiled_for_each_of_many_sizes() -> None:
    """After four sizes a report has no elements, and says why; a size that is known has some."""
    seen = Seen(built(), X)
    called = torch.compile(seen.model, backend=seen.compiler)
    wide = torch.cat([X, X, X])
    for rows in (5, 6, 7, 8):  # of a graph for all sizes
        assert_of_this_run_after(seen, called, wide[:rows])
    compiled = len(seen.compiler.graphs)
    for rows in (9, 10, 11):
        called(wide[:rows])
        assert seen.origin.operands == f"no elements: {_drawing.TOO_MANY}"
    assert_of_this_run_after(seen, called, wide[:7])
    assert len(seen.compiler.graphs) == compiled


@pytest.mark.parametrize("options", [{}, {"replay": True}])
def test_without_room_for_what_is_drawn(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation is named, with the reason why there are no elements."""
    monkeypatch.setattr(_drawing, "has_room", lambda tensors: False)
    seen = Seen(built(), X, **options)
    assert seen.origin.what == "log"
    assert seen.origin.operands == f"no elements: {_drawing.NO_ROOM}"
    assert seen.origin.first_index is None


def assert_of_this_run_after(seen: Seen, called: Any, x: Tensor) -> None:
    output = called(x).detach() * 2
    assert_of_this_run(seen.origin, output)


class Backward(nn.Module):
    """The square root of what a dropout leaves: its backward divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x).abs()).sqrt()


def test_a_backward_has_the_numbers_that_were_drawn() -> None:
    seen = Seen(built(Backward), X)
    zero = (seen.output == 0).nonzero()[0].tolist()
    assert not seen.reports
    seen.output.sum().backward()
    assert seen.origin.what == "sqrt"
    assert f"at {zero}: " in seen.origin.operands


class Attending(nn.Module):
    """Square roots behind attention with a dropout inside, or in front of it."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.before = nn.Linear(16, 16), nn.Dropout(0.3), before

    def attend(self, x: Tensor) -> Tensor:
        q = x.view(1, 1, 4, 16)
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.before:
            return self.attend(self.drop(y.abs()).sqrt())
        return self.drop(self.attend(y).abs()).sqrt()


@pytest.mark.parametrize("before", [False, True])
def test_a_backward_through_a_kernel_that_draws(before: bool) -> None:
    """Behind the kernel the numbers are those of the model; in front of it no numbers are given."""
    seen = Seen(built(lambda: Attending(before)), X)
    assert not seen.reports
    seen.output.sum().backward()
    assert seen.origin.what == "sqrt"
    if before:
        assert seen.origin.operands.startswith("no cause: in a second run the backward of scaled")
        assert seen.origin.first_index is None
    else:
        zero = (seen.output == 0).nonzero()[0].tolist()
        assert f"at {zero}: sqrt(0.0)" in seen.origin.operands


class Loud(nn.Module):
    """An attention with a dropout inside, whose scores overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.drop(self.linear(x)).view(1, 1, 4, 16) * 1e25
        return nn.functional.scaled_dot_product_attention(q, q, q, None, 0.3)


def test_the_inside_of_an_attention_that_drops() -> None:
    """Its scores are made before the dropout; what that drops is not asked for."""
    seen = Seen(built(Loud), X)
    assert seen.origin.what == "scaled_dot_product_attention"
    assert seen.origin.cause == "overflow"
    assert "inside scaled_dot_product_attention, a row" in seen.origin.operands
    assert "in float64" not in seen.origin.operands
    assert seen.origin.fixes


class Block(nn.Module):
    """A layer of a transformer, whose attention drops inside an operation with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.3, batch_first=True)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x.view(1, 4, 16))).abs().log()


def test_a_layer_of_a_transformer() -> None:
    seen = Seen(built(Block), X)
    assert_of_this_run(seen.origin, seen.output.detach())


UNDER_INDUCTOR = [
    (Net, {}, torch.float32),
    (Net, {"replay": True}, torch.bfloat16),
    pytest.param(Checkpointed, {}, torch.float32, marks=pytest.mark.campaign),
    pytest.param(Block, {}, torch.float32, marks=pytest.mark.campaign),
    pytest.param(Block, {"replay": True}, torch.float32, marks=pytest.mark.slow),
    pytest.param(Noisy, {}, torch.float32, marks=pytest.mark.campaign),
    pytest.param(Attention, {}, torch.float32, marks=pytest.mark.campaign),
    pytest.param(Kept, {"full_every": 2}, torch.float32, marks=pytest.mark.campaign),
]


@pytest.mark.parametrize(("kind", "options", "dtype"), UNDER_INDUCTOR)
def test_under_inductor(kind: type[nn.Module], options: dict[str, Any], dtype: torch.dtype) -> None:
    """In training, where the forward was compiled with its backward."""
    seen = Seen(built(kind).to(dtype), X.to(dtype), compiler="inductor", **options)
    assert_of_this_run(seen.origin, seen.output.detach())
    plain = built(kind).to(dtype)
    torch._dynamo.reset()
    torch.manual_seed(1)
    output = torch.compile(plain, backend="inductor")(X.to(dtype))
    torch.testing.assert_close(output, seen.output, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), seen.state)


def test_a_backward_under_inductor() -> None:
    seen = Seen(built(Backward), X, compiler="inductor")
    zero = (seen.output == 0).nonzero()[0].tolist()
    seen.output.sum().backward()
    assert f"at {zero}: sqrt(0.0)" in seen.origin.operands


class Branch(Net):
    """A dropout in a branch, in front of a log."""

    def forward(self, x: Tensor) -> Tensor:
        def drops(y: Tensor) -> Tensor:
            return nn.functional.dropout(y, 0.3)

        return torch.cond(x.sum() > 0, drops, lambda y: y.sin(), (x,)).log()


def test_behind_a_draw_in_a_branch_there_are_no_elements() -> None:
    seen = Seen(built(Branch), X)
    assert seen.origin.what == "log"
    assert seen.origin.operands == f"no elements: {draws.RANDOM}"
    assert seen.origin.first_index is None


class Raising(Net):
    """A decomposition of what a dropout leaves, which is not positive definite."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x[:, :4]) * torch.nan
        return torch.linalg.cholesky(y) + 1


def test_a_graph_that_raises_is_judged_as_before() -> None:
    torch._dynamo.reset()
    model = fxguard.instrument(built(Raising))
    with pytest.raises(fxguard.NonFiniteError, match="mul made NaN") as caught:
        torch.compile(model, backend=Compiler())(X)
    assert caught.value.report.error
