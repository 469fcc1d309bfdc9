"""Equal layers are captured once, and each is checked as if it had been captured by itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.batch.active import here
from fxguard.capture import layers
from fxguard.install import captures

LAYERS, WIDTH = 6, 8


@pytest.fixture(autouse=True)
def _any_layer_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "LEAST_WORK", 0)
    yield
    assert here.layers is None
    assert get_eval_frame_callback() is None


class Layer(nn.Module):
    """Attention and dropout, with a residual connection."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed: Tensor = self.dropout(self.out(scaled_dot_product_attention(q, k, v)))
        return x + mixed


class Rest(nn.Module):
    """A layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Embedding, equal layers, norm and head."""

    def __init__(self, layer: Any = Layer, count: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(layer(index) for index in range(count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.h:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


IDS = torch.arange(10).view(2, 5)


def net(layer: Any = Layer, count: int = LAYERS) -> Any:
    """A model with weights that are always the same."""
    torch.manual_seed(0)
    return Net(layer, count)


def graphs_of(model: nn.Module) -> int:
    """How many graphs were captured."""
    return len(fxguard.guard_of(model).plans)


def test_one_graph_serves_all_layers() -> None:
    """And each layer is counted."""
    model = fxguard.instrument(net())
    model(IDS)
    assert graphs_of(model) == 1
    coverage = fxguard.guard_of(model).coverage()
    assert str(coverage) == "checked 45 of 45 operations in 1 graph and 3 between graphs"


def test_as_many_operations_as_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unseen, and nothing is seen twice."""
    counts = []
    for least in (0, 2):
        monkeypatch.setattr(layers, "LEAST_SAVED", least)
        model = fxguard.instrument(net())
        model(IDS)
        counts.append(str(fxguard.guard_of(model).coverage()).partition(" operations")[0])
    assert counts[0] == counts[1]


def test_results_gradients_and_random_numbers_are_the_same() -> None:
    """Bit for bit, in several steps, in training and evaluation."""
    plain, model = net(), fxguard.instrument(net())
    for training in (True, False, True):
        results = []
        for each in (plain, model):
            torch.manual_seed(1)
            each.train(training).zero_grad()
            out = each(IDS)
            out.logsumexp(-1).sum().backward()
            results.append([out, torch.rand(1), *(weight.grad for weight in each.parameters())])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_the_layer_is_named_that_made_the_nan(bad: int) -> None:
    """With its own weight, though the graph was captured in the first layer."""
    model = fxguard.instrument(net())
    model(IDS)
    with torch.no_grad():
        model.h[bad].out.weight[1, 2] = torch.inf
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(IDS)
    report = caught.value.report
    assert report.verdict[0].startswith(f"weight h.{bad}.out.weight turned inf")
    [first] = [f for f in report.frames if any(r.label == "weight" and r.is_bad for r in f.rows)]
    assert first.name == f"h.{bad}.out"


def test_a_frame_is_the_same_in_a_graph_and_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, lines, labels and numbers of every row."""
    frames = []
    for least in (0, 2):
        monkeypatch.setattr(layers, "LEAST_SAVED", least)
        model = fxguard.instrument(net().eval(), max_frames_to_save=100)
        model(IDS)
        frames.append(fxguard.guard_of(model).frames())
    for by_layers, whole in zip(*frames, strict=True):
        assert by_layers == whole


def test_a_weight_between_the_layers_has_turned_bad() -> None:
    """The batch before had read it and found it good."""
    model = fxguard.instrument(net())
    model(IDS)
    with torch.no_grad():
        model.norm.weight[1] = torch.nan
    with pytest.raises(fxguard.NonFiniteError, match=r"weight norm\.weight turned NaN"):
        model(IDS)


@pytest.mark.parametrize("bad", [0, 4])
def test_a_bad_gradient_is_named_in_its_layer(bad: int) -> None:
    """The square root of 0 has an infinite derivative."""

    class Roots(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.norm.bias.square().sum().sqrt()

    model = fxguard.instrument(net(Roots))
    with torch.no_grad():
        for index, layer in enumerate(model.h):
            layer.norm.bias.fill_(float(index != bad))
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(IDS).logsumexp(-1).sum().backward()
    assert f"backward of sqrt in h.{bad} made" in caught.value.report.verdict[0]


def test_the_selftest_looks_into_each_layer() -> None:
    """With the layer's own weights."""
    model = fxguard.instrument(net())
    model(IDS)
    one = fxguard.instrument(net(count=5))
    one(IDS)
    six, five = (fxguard.guard_of(each).selftest() for each in (model, one))
    assert six
    assert (six.graphs, five.graphs) == (1, 1)
    assert six.planted * 5 == five.planted * 6 > 0


def test_a_layer_that_raises_leaves_nothing_behind() -> None:
    """The model catches it and goes on with the next."""

    class Raises(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if self.index == 2:
                raise ValueError("of the user")
            return super().forward(x)

    class Catches(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.h:
                try:
                    x = layer(x)
                except ValueError:
                    x = x + 1
            logits: Tensor = self.head(x)
            return logits

    torch.manual_seed(0)
    plain = Catches(Raises).eval()
    model = fxguard.instrument(copy.deepcopy(plain))
    for _ in range(2):
        assert torch.equal(plain(IDS), model(IDS))
    raising = fxguard.instrument(net(Raises))
    for _ in range(2):
        with pytest.raises(ValueError, match="of the user"):
            raising(IDS)
        assert here.layers is None
        assert get_eval_frame_callback() is None


def captured_whole(model: nn.Module, ids: Tensor = IDS) -> bool:
    """Whether a call of the model needed one graph and nothing else."""
    model(ids)
    return "between" not in str(fxguard.guard_of(model).coverage())


def test_inputs_of_many_sizes_are_no_obstacle() -> None:
    """A nested tensor says no number of rows; the model is captured whole, or left to Python."""

    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(Rest() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.h:
                x = layer(x)
            return x

    torch.manual_seed(0)
    plain = Linears()
    model = fxguard.instrument(copy.deepcopy(plain))
    parts = [torch.rand(2, WIDTH), torch.rand(3, WIDTH)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert torch.equal(plain(jagged).values(), model(jagged).values())


def test_inputs_that_do_not_say_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a class of its own may raise; the call goes on."""

    def raises(given: Any) -> int:
        raise ValueError("of the user")

    monkeypatch.setattr(captures, "rows_of", raises)
    assert captured_whole(fxguard.instrument(net()))


def test_few_layers_are_captured_whole() -> None:
    """Three equal ones save little."""
    assert captured_whole(fxguard.instrument(net(count=3)))


def test_equal_parts_of_unequal_layers() -> None:
    """Wherever they stand: attention and the rest alternate in lists of their own."""

    class Alternates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lists = nn.ModuleList(
                nn.ModuleList([nn.Identity(), Layer() if index % 2 else Rest()])
                for index in range(16)
            )

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.lists:  # type: ignore[misc] # iterable lists
                x = second(first(x))
            return x

    torch.manual_seed(0)
    plain = Alternates().eval()
    model = fxguard.instrument(copy.deepcopy(plain))
    x = torch.rand(2, 3, WIDTH, requires_grad=True)
    assert torch.equal(plain(x), model(x))
    coverage = str(fxguard.guard_of(model).coverage())
    assert coverage == "checked 80 of 80 operations in 2 graphs"


def test_layers_with_hooks_are_captured_whole() -> None:
    """And again one by one when the hooks are gone."""
    model = fxguard.instrument(net())
    handles = [layer.register_forward_hook(lambda *_: None) for layer in model.h]
    assert captured_whole(model)
    for handle in handles:
        handle.remove()
    assert not captured_whole(model)


def test_a_part_with_a_compiler_of_its_own() -> None:
    """It is inlined as ever, and its compiler sees nothing."""
    model = net()
    model.head = torch.compile(model.head, backend="eager")
    assert captured_whole(fxguard.instrument(model))
    compiled = net()
    compiled.head.compile(backend="eager")
    assert captured_whole(fxguard.instrument(compiled))


def test_layers_that_the_user_keeps_from_torchdynamo() -> None:
    """They run in Python, as without layers that share a capture; each is checked there."""

    class Disabled(Net):
        @torch.compiler.disable
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    class Partly(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.some(self.embed(ids))
            for layer in self.h[2:]:
                x = layer(x)
            return x

        @torch.compiler.disable
        def some(self, x: Tensor) -> Tensor:
            for layer in self.h[:2]:
                x = layer(x)
            return x

    for kind, between in ((Disabled, 45), (Partly, 15)):
        model = fxguard.instrument(kind())
        for _ in range(2):
            model(IDS)
        assert f" {between} between graphs" in str(fxguard.guard_of(model).coverage())


def test_a_part_that_keeps_operations_in_float32() -> None:
    """Its graphs are rewritten."""
    model = fxguard.instrument(net())
    fxguard.keep_float32(model, "h.2.norm")
    assert captured_whole(model)


@pytest.mark.parametrize("options", [{"underflow": 0.5}, {"replay": True}])
def test_options_that_need_the_whole_graph(options: dict[str, Any]) -> None:
    """Underflow and replay."""
    assert captured_whole(fxguard.instrument(net(), **options))


def test_who_compiles_the_model_gets_one_graph() -> None:
    """Also with ``fullgraph``."""
    for fullgraph in (False, True):
        model = fxguard.instrument(net())
        torch.compile(model, backend="aot_eager", fullgraph=fullgraph)(IDS)
        assert "between" not in str(fxguard.guard_of(model).coverage())


def test_inputs_that_would_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients nobody else keeps them."""
    monkeypatch.setattr(layers, "MOST_KEPT", LAYERS * 4 * WIDTH * IDS.numel())
    model = fxguard.instrument(net())
    with torch.no_grad():
        assert not captured_whole(model)
        model(torch.cat([IDS, IDS]))
        assert "between" not in str(fxguard.guard_of(model).coverage())
    model(torch.cat([IDS, IDS]))
    assert "between" in str(fxguard.guard_of(model).coverage())


def test_many_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some, a capture of the whole model pays."""
    monkeypatch.setattr(captures, "MOST_SMALL_CALLS", 2)
    monkeypatch.setattr(captures, "MOST_TOKENS", 0)
    model = net().eval()
    work = sum(weight.numel() for weight in model.h[0].parameters())
    monkeypatch.setattr(layers, "LEAST_WORK", 10 * work / torch.get_num_threads())
    fxguard.instrument(model)
    many = IDS.repeat(4, 1)
    with torch.no_grad():
        assert [captured_whole(model, many) for _ in range(3)] == [False] * 3
        assert [captured_whole(model, IDS[:1]) for _ in range(4)] == [False, False, True, True]
        assert not captured_whole(model, many)


@pytest.mark.parametrize("is_felt", [True, False])
def test_operations_between_layers(monkeypatch: pytest.MonkeyPatch, is_felt: bool) -> None:
    """Each costs as much as the call of a graph: where they are many, a capture pays, too."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.inner(ids)
            for _ in range(40 if is_felt else 1):
                found = found.sin()
            return found

    monkeypatch.setattr(captures, "MOST_SMALL_CALLS", 2)
    monkeypatch.setattr(captures, "MOST_TOKENS", 0)
    model = Around()
    work = 3 * sum(weight.numel() for weight in model.inner.h[0].parameters())
    rows = IDS.numel() / 4  # from which on a layer does not feel the call of its graph
    monkeypatch.setattr(layers, "LEAST_WORK", rows * work / torch.get_num_threads())
    fxguard.instrument(model)
    assert [captured_whole(model) for _ in range(6)] == [False] * 3 + 3 * [is_felt]


def test_the_tokens_of_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts as a part of a call."""
    monkeypatch.setattr(captures, "MOST_SMALL_CALLS", 2)
    monkeypatch.setattr(captures, "TOKEN", 0.5)
    monkeypatch.setattr(layers, "LEAST_WORK", 1 << 60)
    model = fxguard.instrument(net().eval())
    assert [captured_whole(model) for _ in range(6)] == [False] * 4 + [True] * 2


def test_more_layers_than_captures_of_one_function() -> None:
    """Each may need its own."""

    class Scales(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + 1 / (2 + self.index))

    model = fxguard.instrument(net(Scales, count=70))
    model(IDS)
    assert str(fxguard.guard_of(model).coverage()).startswith("checked 73 of 73 operations in 70 ")


def test_replaced_layers() -> None:
    """A new one of another kind runs in Python once, and in a graph from then on."""

    class Other(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    plain = net().eval()
    model = fxguard.instrument(copy.deepcopy(plain))
    model(IDS)
    for each in (plain, model):
        torch.manual_seed(3)
        each.h[2] = Other().eval()
    for _ in range(3):
        assert torch.equal(plain(IDS), model(IDS))
    with torch.no_grad():
        model.h[2].out.weight.fill_(torch.nan)
    with pytest.raises(fxguard.NonFiniteError, match=r"weight h\.2\.out\.weight turned NaN"):
        model(IDS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    """Their second forward runs in the backward."""

    class Saves(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.h:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            logits: Tensor = self.head(self.norm(x))
            return logits

    results = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = Saves()
        if guarded:
            fxguard.instrument(model)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            model(IDS).logsumexp(-1).sum().backward()
        results.append([weight.grad for weight in model.parameters()])
    assert all(map(torch.equal, *results))


def test_threads_have_layers_of_their_own() -> None:
    """While one thread runs a layer, another is between layers."""
    plain, model = net().eval(), fxguard.instrument(net().eval())
    want = plain(IDS)
    found: list[bool] = []

    def call() -> None:
        found.extend(torch.equal(model(IDS), want) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


class Slot:
    """What a layer wrote into a cache."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def update(self, new: Tensor) -> Tensor:
        """All that was written so far."""
        self.kept = new if self.kept is None else torch.cat([self.kept, new], dim=1)
        return self.kept


class Cache:
    """A slot for each layer."""

    def __init__(self) -> None:
        self.slots = [Slot() for _ in range(LAYERS)]

    def update(self, new: Tensor, index: int) -> Tensor:
        """Of one layer."""
        return self.slots[index].update(new)


class Remembers(Layer):
    """Attends to what earlier calls saw."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """A residual block."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        kv = cache.update(torch.cat([k, v], dim=-1), self.index)
        return x + self.out(scaled_dot_product_attention(q, *kv.chunk(2, dim=-1)))


class Decoder(Net):
    """Layers with a cache."""

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.h:
            x = layer(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


def decode(model: nn.Module, parts: int) -> tuple[Cache, list[Tensor]]:
    """The logits of several calls with one cache."""
    cache = Cache()
    return cache, [model(part, cache) for part in IDS.chunk(parts, dim=1)]


def test_each_layer_has_its_own_slot_of_a_cache() -> None:
    """One graph for the empty slots, and one for those that hold something."""
    torch.manual_seed(0)
    plain = Decoder(Remembers)
    model = fxguard.instrument(copy.deepcopy(plain))
    (want, logits), (got, guarded) = decode(plain, 3), decode(model, 3)
    assert all(map(torch.equal, logits, guarded))
    for a, b in zip(want.slots, got.slots, strict=True):
        assert a.kept is not None
        assert b.kept is not None
        assert torch.equal(a.kept, b.kept)
    assert graphs_of(model) < LAYERS
    with torch.no_grad():
        got.slots[4].kept = torch.full_like(got.slots[4].kept, torch.nan)  # type: ignore[arg-type]
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(IDS[:, :1], got)
    assert "input `cache.slots[self.index].kept`" in str(caught.value.report.verdict[0])
    assert "h.4 scaled_dot_product_attention" in str(caught.value)


def test_slots_that_differ_are_told_apart() -> None:
    """What is read of the slot is looked at in each layer."""
    torch.manual_seed(0)
    plain = Decoder(Remembers)
    model = fxguard.instrument(copy.deepcopy(plain))
    results = []
    for each in (plain, model):
        cache = Cache()
        each(IDS, cache)
        for index in (1, 4):
            cache.slots[index].kept = None
        cache.slots[2].kept = torch.ones(2, 1, 2 * WIDTH)
        results.append(each(IDS[:, :1], cache))
    assert torch.equal(*results)


def test_a_number_that_decides_something_is_looked_at() -> None:
    """Every second layer does something else, and still finds its slot."""

    class Alternates(Remembers):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            found = super().forward(x, cache)
            return found.tanh() if self.index % 2 else found * (self.index + 1)

    torch.manual_seed(0)
    plain = Decoder(Alternates)
    model = fxguard.instrument(copy.deepcopy(plain))
    (_, logits), (_, guarded) = decode(plain, 2), decode(model, 2)
    assert all(map(torch.equal, logits, guarded))


def test_a_list_that_the_layer_has_changed() -> None:
    """Then the number says another item than before."""

    class Rotates(Layer):
        def forward(self, x: Tensor, items: Any = None) -> Tensor:
            items.append(items.pop(0))
            scaled: Tensor = x * items[self.index]
            return scaled

    class Passes(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x, items = self.embed(ids), [torch.tensor(float(i + 1)) for i in range(LAYERS)]
            for layer in self.h:
                x = layer(x, items)
            return x

    torch.manual_seed(0)
    plain = Passes(Rotates)
    model = fxguard.instrument(copy.deepcopy(plain))
    for _ in range(2):
        assert torch.equal(plain(IDS), model(IDS))
