"""Two forms side by side: the model's form is the model's, and the wide form is float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import Node, symbolic_trace
from torch.utils.checkpoint import checkpoint

from fxguard.batch.events import GraphRun
from fxguard.graph.wide_form import NotJudged, Ran
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from fxguard.rerun.other_values import Perturbed, perturbed
from fxguard.rerun.start import Start, look_through
from fxguard.rerun.walk import Ended, SecondForm, Walk, Watcher, Watchers
from fxguard.rerun.wide_run import WideForm
from fxguard.testing.watch import as_module


class Seen:
    """What came of one run: both forms of what the graph returned."""

    def __init__(self) -> None:
        self.low: Sequence[Any] = ()
        self.wide: Sequence[Any] = ()
        self.form = WideForm()


def in_both(model: Any, *args: Any, form: WideForm | None = None) -> tuple[Any, Seen]:
    """What a model returns, and the same again in both forms."""
    seen = Seen()
    if form is not None:
        seen.form = form

    def hear(run: GraphRun, outputs: Sequence[Any] | None) -> None:
        seen.low, seen.wide = Start(run).again(seen.form)

    return heard(model, hear, *args), seen


def heard(model: Any, hear: Callable[..., None], *args: Any) -> Any:
    """What a model returns, whose graph runs are heard while they are open."""
    module = as_module(model)
    guard = GuardedModel(module, Options(on_detect=lambda report: None), Plugins(hear=hear))
    guard.install()
    try:
        return module(*args)
    finally:
        guard.uninstall()


def assert_wide(function: Callable[..., Any], *args: Any, rtol: float = 1e-12) -> Seen:
    """The model's form is bit for bit the model's; the wide form is that of the same in float64."""
    expected = function(*(a.detach().double() for a in args))
    returned, seen = in_both(function, *args)
    torch.testing.assert_close(seen.low[0], returned, rtol=0, atol=0, equal_nan=True)
    wide = seen.wide[0]
    assert wide.dtype is torch.float64
    torch.testing.assert_close(wide, expected, rtol=rtol, atol=1e-14)
    assert not seen.form.taken_over
    return seen


X = torch.linspace(0.1, 3.0, 12).view(3, 4)


def in_place(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(3).add_(x)
    y += 0.1
    return y / 7


def in_place_on_a_view(x: Tensor) -> Tensor:
    """What is written through a view is read through the whole, and the other way."""
    y = x.clone()
    row, column = y[1], y[:, 2]
    row.mul_(0.3)
    column.add_(x[:, 0] / 3)
    y[0, 1:3] = x[2, :2].sin()
    return y.cumsum(1) * row + column.sum()


def in_place_on_the_input(x: Tensor) -> Tensor:
    x.div_(3)
    return x.t().reshape(-1).sqrt()


def views(x: Tensor) -> Tensor:
    y = x.sin().t().unflatten(1, (1, 3)).squeeze(1).flip(0)
    return y.expand(2, 4, 3).permute(2, 0, 1).reshape(3, -1).chunk(2, 1)[1] / 3


def out_argument(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.exp(x / 3, out=y)
    return y * x


def several_results(x: Tensor) -> Tensor:
    values, indices = (x / 3).topk(2, 1)
    mean, var = torch.var_mean(x / 7)
    return values.gather(1, indices * 0) + mean * var


PLAIN = [in_place, in_place_on_a_view, in_place_on_the_input, views, out_argument, several_results]


@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_the_wide_form_is_float64(function: Callable[..., Any]) -> None:
    assert_wide(function, X.clone())


def with_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda y: (y / 3).exp() * y, x.sin(), use_reentrant=False) + x


def with_cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1, lambda y: y.sin() / 3, lambda y: y.cos(), (x / 7,))


def with_while_loop(x: Tensor) -> Tensor:
    count = torch.tensor(0)
    done = while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, (y * 1.1).sin()), (count, x / 3))
    return done[1]


def with_scan(x: Tensor) -> Tensor:
    last, rows = scan(lambda c, y: (c / 3 + y, (c * y).sin()), x[0] / 7, x)
    return rows + last


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x / 3) ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * x / 9


def with_autograd_function(x: Tensor) -> Tensor:
    return Cube.apply(x.sin()) / 7


BODIES = [with_checkpoint, with_cond, with_while_loop, with_scan, with_autograd_function]


@pytest.mark.parametrize("function", BODIES, ids=lambda function: function.__name__)
def test_bodies_are_entered_in_both_forms(function: Callable[..., Any]) -> None:
    assert_wide(function, X.clone().requires_grad_(function is with_autograd_function))


def test_casts_are_identities() -> None:
    """Also that of autocast: the wide form never was in bfloat16."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x.to(torch.float16).float() @ w
        return y.bfloat16().type_as(x) / 3

    def exact(x: Tensor, w: Tensor) -> Tensor:
        return x @ w / 3

    w = torch.linspace(-1, 1, 8).view(4, 2)
    returned, seen = in_both(model, X, w)
    assert torch.equal(seen.low[0], returned)
    torch.testing.assert_close(seen.wide[0], exact(X.double(), w.double()), rtol=1e-12, atol=0)
    assert (returned - seen.wide[0]).abs().max() > 1e-3  # the model was


def test_integers_are_those_of_the_model() -> None:
    """A bucket must not flip because float64 is on the other side of a border."""

    def model(x: Tensor) -> Tensor:
        bucket = (x / 3 * 3 * 100).long()
        return torch.where(x / 3 * 3 >= x, bucket, bucket + 100)

    x = torch.linspace(0.1, 2, 32, dtype=torch.float16)
    returned, seen = in_both(model, x)
    assert torch.equal(seen.wide[0], returned)
    assert not torch.equal(model(x.double()), returned)  # it would flip


def test_dropout_draws_in_the_models_dtype() -> None:
    def model(x: Tensor) -> Tensor:
        return F.dropout(x.exp() / 3, 0.5) + torch.rand_like(x)

    torch.manual_seed(0)
    returned, seen = in_both(model, torch.randn(64, dtype=torch.float16))
    low, wide = seen.low[0], seen.wide[0]
    assert torch.equal(low, returned)
    torch.testing.assert_close(low.double(), wide, rtol=1e-2, atol=1e-3)  # the same elements
    assert not torch.equal(low.double(), wide)  # it is more precise
    assert not seen.form.taken_over


def test_random_numbers_are_put_back() -> None:
    torch.manual_seed(0)
    plain = F.dropout(X.exp(), 0.5), torch.rand(2)
    torch.manual_seed(0)
    returned, _ = in_both(lambda x: F.dropout(x.exp(), 0.5), X)
    assert torch.equal(returned, plain[0])
    assert torch.equal(torch.rand(2), plain[1])


@torch.library.custom_op("lockstep_test::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


@triple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_has_no_wide_form_is_said() -> None:
    returned, seen = in_both(lambda x: triple(x.exp()) / 7, X)
    assert torch.equal(seen.low[0], returned)
    assert set(seen.form.taken_over.values()) == {"no float64 kernel for triple"}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Counting(WideForm):
    """How many bytes the second form holds at most, after any operation."""

    most = 0

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        tensors = (x for x in walk.others.values() if isinstance(x, Tensor))
        held = sum(x.numel() * x.element_size() for x in tensors)
        self.most = max(self.most, held)


def test_no_wide_copy_of_the_weights_is_held() -> None:
    torch.manual_seed(0)
    model = Small().bfloat16()
    weights = sum(p.numel() for p in model.parameters())
    form = Counting()
    _, seen = in_both(model, torch.randn(2, 32, dtype=torch.bfloat16), form=form)
    assert not form.taken_over
    assert seen.wide[0].dtype is torch.float64
    assert form.most <= 4 * 2 * 32 * 8 < weights


def test_a_collective_is_never_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the graph holds one, a second run ends there."""

    def model(x: Tensor) -> Tensor:
        return torch.relu(x)

    graph = symbolic_trace(model)
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.target = torch.ops._c10d_functional.all_reduce.default
    node.args = (*node.args, "sum", "0")
    node.kwargs = {}  # symbolic_trace writes inplace=False
    graph.recompile()
    with pytest.raises(NotJudged, match="all_reduce is a collective"):
        Walk(graph, Watchers([WideForm()])).run_both([X])


class Nothing(SecondForm):
    """A second form that differs nowhere."""

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        assert not differs
        return True

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        assert all(a is b for a, b in zip(args, ran.args, strict=True) if isinstance(a, Tensor))
        return ran.result

    def copy_of(self, memory: Tensor) -> Tensor:
        raise AssertionError("nothing is written")


def test_where_nothing_differs_nothing_is_held() -> None:
    step = Walk(symbolic_trace(lambda x: x.exp().sum(0) / 3), Watchers([Nothing()]))
    low, other = step.run_both([X])
    assert low is other
    assert not step.others


def test_a_view_that_does_not_differ_is_written_in_memory_that_does() -> None:
    """The second form of the memory is written as well, although the view's elements are equal."""

    def model(memory: Tensor, new: Tensor) -> Tensor:
        part = memory[:2]
        part.copy_(new)
        return memory * 2

    memory = torch.tensor([1.0, 2.0, torch.nan])
    graph = symbolic_trace(model)
    low, other = Walk(graph, Watchers([Perturbed({}, below=True)])).run_both(
        [memory, torch.tensor([3.0, 4.0])],
        [perturbed(memory, below=True), torch.tensor([3.0, 4.0])],
    )
    assert low[:2].tolist() == other[:2].tolist() == [6.0, 8.0]
    assert other[2].isfinite()


class Names(Watcher):
    """The operations that it has seen; it raises after some of them."""

    def __init__(self, error: Exception | None = None, most: int = 99) -> None:
        self.error = error
        self.most = most
        self.seen: list[str] = []

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        self.seen.append(ran.call.kind)
        if self.error is not None and len(self.seen) >= self.most:
            raise self.error


class NoForm(WideForm):
    """A second form that exists for no operation."""

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        raise NotJudged("there is none")


SINE = ["exp", "sin", "sum"]


def sine(x: Tensor) -> Tensor:
    return x.exp().sin().sum(0)


def looked_through(*watchers: Watcher) -> dict[Watcher, str]:
    """What stopped some watchers of one run of :func:`sine`."""
    stopped: list[dict[Watcher, str]] = []

    def hear(run: GraphRun, outputs: Sequence[Any] | None) -> None:
        stopped.append(look_through(run, *watchers))

    heard(sine, hear, X)
    (only,) = stopped
    return only


@pytest.mark.parametrize("error", [Ended(), NotJudged("enough"), RuntimeError("a fault of it")])
def test_a_watcher_that_stops_does_not_stop_the_others(error: Exception) -> None:
    """Its reason is told to whoever asks for it."""
    first, second = Names(error, most=1), Names()
    stopped = looked_through(first, second)
    assert (first.seen, second.seen) == (SINE[:1], SINE)
    assert stopped == ({first: "enough"} if isinstance(error, NotJudged) else {})


def test_a_second_form_that_stops_leaves_the_models_form() -> None:
    form, watcher = NoForm(), Names()
    assert looked_through(watcher, form) == {form: "there is none"}
    assert watcher.seen == SINE


def test_a_run_ends_with_its_last_watcher() -> None:
    """What nobody looks at is not computed."""
    first, second = Names(Ended(), most=1), Names(Ended(), most=2)
    assert looked_through(first, second) == {}
    assert (first.seen, second.seen) == (SINE[:1], SINE[:2])


def test_where_results_are_wanted_each_watcher_ends_the_run() -> None:
    """Results of a run that went on without its second form would be no answer."""
    graph, watcher = symbolic_trace(sine), Names()
    with pytest.raises(NotJudged, match="there is none"):
        Walk(graph, Watchers([watcher, NoForm()])).run_both([X])
    assert watcher.seen == []
