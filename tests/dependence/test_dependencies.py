"""``dependencies``: what leaks is named by its line, and what looks like it is not told."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fxguard
from fxguard.types import Dependence, Dependencies
from tests.support.schema import told

BATCH, LENGTH, WIDTH = 4, 9, 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Tokens(nn.Module):
    """Embeds tokens, runs something, and makes scores of tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.inner = inner
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, **named: Any) -> Tensor:
        scores: Tensor = self.head(self.inner(self.embedding(ids), **named))
        return scores


class Attention(nn.Module):
    """Causal attention by hand: ``diagonal=1`` is right."""

    def __init__(self, diagonal: int, kept: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.diagonal, self.kept = diagonal, kept
        ones = torch.ones(LENGTH, LENGTH)
        hidden = torch.triu(ones, diagonal=diagonal).bool()  # the kept mask
        self.register_buffer("hidden", hidden)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).view(len(x), length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        hidden = self.hidden[:length, :length]
        if not self.kept:
            hidden = torch.triu(torch.ones(length, length), diagonal=self.diagonal) > 0  # the mask
        scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(x.shape)


class MaskedLate(Attention):
    """Hides what the softmax has weighed already."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        weights = weights.masked_fill(self.hidden, 0.0)  # too late
        return weights @ v


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self.function(*args, **named)


class Recurrent(nn.Module):
    """A recurrent layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH // (2 if options.get("bidirectional") else 1), **options)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]  # runs
        return found


class Convolution(nn.Module):
    """A convolution over time."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=0 if causal else 1)  # pads

    def forward(self, x: Tensor) -> Tensor:
        y = x.mT
        return self.layer(F.pad(y, (2, 0)) if self.causal else y).mT  # type: ignore[no-any-return]


def step_by_step(x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t])
        out.append(state)
    return torch.stack(out, 1)


def wrong_view(x: Tensor) -> Tensor:
    turned = x.reshape(x.shape[1], x.shape[0], -1)  # moves nothing: it only renames
    weights = (turned @ turned.mT).softmax(-1)
    return (weights @ turned).reshape(x.shape)


def turned(x: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    return y.cumsum(0).transpose(0, 1)


def ids(padded: bool = False) -> Tensor:
    found = torch.randint(1, 20, (BATCH, LENGTH))
    for row, real in enumerate((LENGTH, 5, 7, 3)):
        found[row, real if padded else LENGTH :] = 0
    return found


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line and "line_of" not in line)


def at_line(answer: Dependence, text: str) -> bool:
    """Whether an answer names the line with this text: the leak, or what it says of it."""
    return f"test_dependencies.py:{line_of(text)}" in f"{answer.leak} {answer.because}"


LATER: dict[str, tuple[nn.Module, str]] = {
    "mask off by one": (Attention(2), "# the mask"),
    "a kept mask": (Attention(2, kept=True), "# the kept mask"),
    "masked behind the softmax": (MaskedLate(1), "# too late"),
    "both directions": (
        Recurrent(batch_first=True, bidirectional=True),
        "self.layer = nn.GRU",
    ),
    "padded on both sides": (Convolution(causal=False), "# pads"),
    "mean over time": (Applied(lambda x: x + x.mean(1, keepdim=True)), '"mean over time"'),
    "a shift of the wrong sign": (Applied(lambda x: x + x.roll(-1, 1)), "x + x.roll(-1, 1)"),
    "a norm over time": (Applied(lambda x: F.instance_norm(x.mT).mT), '"a norm over time"'),
    "a mask turned round": (
        Applied(
            lambda x: F.scaled_dot_product_attention(
                x, x, x, attn_mask=torch.ones(LENGTH, LENGTH).triu().bool()
            )
        ),
        "attn_mask=torch.ones(LENGTH, LENGTH).triu()",
    ),
}

CAUSAL = {
    "attention": Attention(1),
    "a kept mask": Attention(1, kept=True),
    "one direction": Recurrent(batch_first=True),
    "padded in front": Convolution(causal=True),
    "a loop": Applied(step_by_step),
    "time first inside": Applied(turned),
    "a shift": Applied(lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x),
    "torch's": Applied(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "a norm of each": nn.LayerNorm(WIDTH),
    "flipped twice": Applied(lambda x: x.flip(1).flip(1)),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_position_is_found_with_its_line(name: str) -> None:
    """Wherever the mistake is: a mask, a direction, a norm, a shift."""
    inner, text = LATER[name]
    model = Tokens(inner).eval()
    found = fxguard.dependencies(model, ids())
    assert found.positions.depends, found
    assert at_line(found.positions, text), found
    assert found.positions.path[0].title == "input ids"
    assert found.positions.path[-1].title == "head linear"
    assert found.samples.depends is False
    assert found.padding.depends is None


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_is_not_accused(name: str) -> None:
    """However it is written, in both modes."""
    for model in (Tokens(CAUSAL[name]).eval(), Tokens(CAUSAL[name]).train()):
        found = fxguard.dependencies(model, ids())
        assert found.positions.depends is False, found
        assert found.samples.depends is False, found


SAMPLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softmax over samples": (
        lambda: Applied(lambda x: x.softmax(0)),
        "lambda: Applied(lambda x: x.softmax(0))",
    ),
    "a view for a transposition": (lambda: Applied(wrong_view), "# moves nothing"),
    "time first": (lambda: Recurrent(), "# runs"),
    "the largest of all": (lambda: Applied(lambda x: x / x.abs().max()), '"the largest of all"'),
    "a flip of samples": (lambda: Applied(lambda x: x.flip(0)), '"a flip of samples"'),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_another_sample_is_found_with_its_line(name: str) -> None:
    """Softmax, normalization, a wrong view, a layer that runs along the wrong dimension."""
    make, text = SAMPLES[name]
    found = fxguard.dependencies(Tokens(make()), ids())
    assert found.samples.depends, found
    assert at_line(found.samples, text) or name == "time first", found
    if name == "time first":
        assert "batch_first=False" in found.samples.because


def test_batch_norm_mixes_samples_in_training_alone() -> None:
    """It is named with its layer, and the mode is said; a norm without statistics in both."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    found = fxguard.dependencies(model, torch.randn(5, 6))
    assert found.samples.leak is not None
    assert found.samples.leak.title == "1 batch_norm"
    assert "training mode" in found.samples.because
    assert "training mode" in str(found)
    found = fxguard.dependencies(model.eval(), torch.randn(5, 6))
    assert found.samples.depends is False
    assert "evaluation mode" in str(found)
    model = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False)).eval()
    found = fxguard.dependencies(model, torch.randn(5, 6))
    assert "track_running_stats=False" in found.samples.because


def test_attention_with_samples_in_the_place_of_time() -> None:
    """``nn.MultiheadAttention`` without ``batch_first``: said, and not if the user says so."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2)  # built

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.attention(x, x, x)[0]
            return found

    x = torch.randn(BATCH, LENGTH, WIDTH)
    found = fxguard.dependencies(Own(), x)
    assert "batch_first=False" in found.samples.because
    assert at_line(found.samples, "# built")
    found = fxguard.dependencies(Own(), x, samples=1)
    assert found.samples.depends is False
    assert found.positions.depends  # dimension 0, and it is not causal


def pooled(x: Tensor, ids: Tensor) -> Tensor:
    return x.mean(1)  # over padding, too


class Pooled(nn.Module):
    """A classifier of padded texts."""

    def __init__(self, pool: Callable[..., Tensor], padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, padding_idx=padding_idx)
        self.pool = pool
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        found: Tensor = self.head(self.pool(x, ids if mask is None else mask))
        return found


def real_mean(x: Tensor, mask: Tensor) -> Tensor:
    real = (mask != 0).to(x.dtype)[..., None]
    return (x * real).sum(1) / real.sum(1)


def attends(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(mask[:, None] == 0, -math.inf)
    return real_mean(scores.softmax(-1) @ x, mask)


def attends_to_all(x: Tensor, mask: Tensor) -> Tensor:
    weights = (x @ x.mT).softmax(-1)  # without the mask
    return real_mean(weights @ x, mask)


def nearly_hides(x: Tensor, mask: Tensor) -> Tensor:
    bias = (1 - mask.to(x.dtype))[:, None] * -5.0  # too little
    scores = x @ x.mT + bias
    return real_mean(scores.softmax(-1) @ x, mask)


PADDED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mean over all": (pooled, "# over padding, too"),
    "no mask": (attends_to_all, "# without the mask"),
    "a weak mask": (nearly_hides, "# too little"),
    "the last position": (lambda x, mask: x[:, -1], '"the last position"'),
    "the length of the batch": (
        lambda x, mask: (x * (mask != 0)[..., None]).sum(1) / x.shape[1],
        "sum(1) / x.shape[1]",
    ),
    "least, of zeros too": (
        lambda x, mask: (x * (mask != 0)[..., None]).square().amin(1),
        "square().amin(1)",
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_found_with_its_line(name: str) -> None:
    """What padding holds, and that there is any: both change the output."""
    pool, text = PADDED[name]
    x = ids(padded=True)
    found = fxguard.dependencies(Pooled(pool), x, mask=(x != 0).long())
    assert found.padding.depends, found
    assert "by mask" in found.padding.evidence
    assert at_line(found.padding, text), found
    assert found.samples.depends is False


@pytest.mark.parametrize("pool", [real_mean, attends])
def test_padding_that_is_hidden(pool: Callable[..., Tensor]) -> None:
    """In each way in which a model is told: masks of both signs, the token, lengths, the user."""
    x = ids(padded=True)
    for mask in ((x != 0).long(), (x != 0).float(), x != 0):
        found = fxguard.dependencies(Pooled(pool), x, mask)
        assert found.padding.depends is False, found
        assert "by mask" in found.padding.evidence
    found = fxguard.dependencies(Pooled(pool, padding_idx=0), x)
    assert "by token 0 of ids" in found.padding.evidence
    assert found.padding.depends is False
    found = fxguard.dependencies(Pooled(pool), x, padding=x == 0)
    assert "by padding=" in found.padding.evidence
    assert found.padding.depends is False
    found = fxguard.dependencies(Pooled(pool), x, padding=0)
    assert found.padding.depends is False


def test_padding_by_its_length_and_in_front() -> None:
    """Lengths among the inputs, and padding on the left of a causal model without positions."""

    class Sums(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            real = torch.arange(x.shape[1])[None] < lengths[:, None]
            return (x * real[..., None]).sum(1)

    x, lengths = torch.randn(3, 6, 2), torch.tensor([6, 4, 2])
    found = fxguard.dependencies(Sums(), x, lengths)
    assert found.padding.depends is False
    assert "by lengths" in found.padding.evidence
    x = ids(padded=True).flip(1)
    found = fxguard.dependencies(Pooled(attends), x, (x != 0).long())
    assert found.padding.depends is False, found
    found = fxguard.dependencies(Pooled(lambda x, mask: x[:, 0]), x, (x != 0).long())
    assert found.padding.depends, found


def test_padding_of_a_model_of_one_length() -> None:
    """Where no other length runs, the contents of the padding are replaced."""

    class Fixed(nn.Module):
        def __init__(self, hides: bool) -> None:
            super().__init__()
            self.hides = hides
            self.mix = nn.Linear(LENGTH, LENGTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x * mask if self.hides else x
            return self.mix(x)  # type: ignore[no-any-return]

    x = torch.randn(BATCH, LENGTH)
    mask = (ids(padded=True) != 0).float()
    found = fxguard.dependencies(Fixed(hides=True), x, mask)
    assert found.padding.depends is False
    found = fxguard.dependencies(Fixed(hides=False), x, mask)
    assert found.padding.depends
    assert found.padding.leak is not None
    assert found.padding.leak.title == "mix linear"


def test_a_batch_of_graphs() -> None:
    """Samples are graphs: an input tells to which one each node belongs."""

    class Graphs(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            self.apart = apart
            self.gate = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            score = self.gate(x)
            weights = score.exp() if self.apart else score.softmax(0)  # over all graphs
            out = x.new_zeros(int(batch.max()) + 1, WIDTH)
            return out.index_add(0, batch, weights * x)

    x, batch = torch.randn(10, WIDTH), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    assert fxguard.dependencies(Graphs(apart=True), x, batch).samples.depends is False
    found = fxguard.dependencies(Graphs(apart=False), x, batch)
    assert at_line(found.samples, "# over all graphs"), found


def test_routing_that_counts_the_whole_batch() -> None:
    """Where no gradient flows: experts with room for so many tokens of the batch."""

    class Routed(nn.Module):
        def __init__(self, room: int) -> None:
            super().__init__()
            self.room = room
            self.gate = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            chosen = F.one_hot(self.gate(x).argmax(-1), 2)
            place = (chosen.cumsum(0) * chosen).sum(-1)
            return x * (place <= self.room)[:, None]

    x = torch.randn(12, WIDTH)
    assert fxguard.dependencies(Routed(room=12), x).samples.depends is False
    found = fxguard.dependencies(Routed(room=3), x)
    assert found.samples.depends
    assert found.samples.leak is not None
    assert found.samples.leak.title == "cumsum"


def test_an_encoder_and_a_decoder() -> None:
    """Later positions of the target, and not those of the source, whatever their lengths."""

    class Translator(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal = causal
            self.embedding = nn.Embedding(20, WIDTH)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            memory, x = self.embedding(src), self.embedding(tgt)
            x = F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)  # own
            return F.scaled_dot_product_attention(x, memory, memory)

    src, tgt = ids(), ids()[:, :6]
    assert fxguard.dependencies(Translator(causal=True), src, tgt).positions.depends is False
    found = fxguard.dependencies(Translator(causal=False), src, tgt)
    assert at_line(found.positions, "# own")
    found = fxguard.dependencies(Translator(causal=True), src, ids())
    assert "of src" in found.positions.evidence  # where lengths are equal, it says which


def test_nothing_of_the_model_changes() -> None:
    """Weights, statistics, hooks, gradients, mode, the random state, and the inputs."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    model(torch.randn(5, 6)).sum().backward()
    x = torch.randn(5, 6)
    before, state, given = copy.deepcopy(model), torch.get_rng_state(), x.clone()
    found = fxguard.dependencies(model, x)
    assert found.samples.depends
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    for (_, one), (_, two) in zip(
        model.state_dict().items(), before.state_dict().items(), strict=True
    ):
        assert torch.equal(one, two)
    assert [p.grad is None for p in model.parameters()] == [False] * 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_a_guarded_model_and_a_compiled_one() -> None:
    """The model inside is asked."""
    model = Tokens(Attention(2))
    fxguard.instrument(model)
    assert fxguard.dependencies(model, ids()).positions.depends
    assert fxguard.guard_of(model)
    fxguard.remove(model)
    compiled = torch.compile(model, backend="eager")
    assert fxguard.dependencies(compiled, ids()).positions.depends


def test_a_model_that_keeps_more_than_buffers() -> None:
    """A state from call to call: each run begins with the model as it was given."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            found = x if self.last is None else x + self.last
            self.last = x.mean(0)
            return found

    found = fxguard.dependencies(Keeps(), torch.randn(4, 3))
    assert found.samples.depends is False

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            COUNT.append(1)
            return x + len(COUNT)

    COUNT: list[int] = []
    with pytest.raises(fxguard.FxguardError, match="two runs of Counts"):
        fxguard.dependencies(Counts(), torch.randn(4, 3))


def test_a_model_of_one_dtype() -> None:
    """One that does not run in float64 runs in its own dtype, and the answer says so."""

    class Float32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.float()).softmax(0)  # type: ignore[no-any-return]

    found = fxguard.dependencies(Float32(), torch.randn(4, 3))
    assert found.dtype == "float32"
    assert found.samples.depends


def test_what_cannot_be_asked_is_said() -> None:
    """One sample, a loss, numbers without positions, padding that is none."""
    model = nn.Linear(6, 6)
    found = fxguard.dependencies(model, torch.randn(1, 6))
    assert found.samples.depends is None
    assert "at least 2 samples" in found.samples.evidence
    assert found.positions.evidence.startswith("not asked")
    found = fxguard.dependencies(Applied(lambda x: x.sum()), torch.randn(3, 6))
    assert "no output holds 3 samples" in found.samples.evidence
    x = ids()
    found = fxguard.dependencies(Pooled(real_mean), x, torch.ones_like(x))
    assert found.padding.depends is None
    assert "nothing is padding, by mask" in found.padding.evidence


def test_wrong_use() -> None:
    """What is no module, no inputs, no such dimension, no such padding."""
    model = Tokens(Attention(1))
    with pytest.raises(fxguard.FxguardError, match=r"needs a torch\.nn\.Module, got int"):
        fxguard.dependencies(3)  # type: ignore[arg-type]
    with pytest.raises(fxguard.FxguardError, match="needs inputs"):
        fxguard.dependencies(model)
    with pytest.raises(fxguard.FxguardError, match="boolean tensor"):
        fxguard.dependencies(model, ids(), padding=torch.ones(2))
    with pytest.raises(fxguard.FxguardError, match="positions=5"):
        fxguard.dependencies(model, ids(), positions=5)
    with pytest.raises(Exception, match="unexpected keyword"):
        fxguard.dependencies(model, ids(), wrong=1)


def test_a_long_sequence_is_cut_at_some_positions() -> None:
    """And the answer says at how many; the last and the first ones are among them."""
    x = torch.randint(0, 20, (2, 300))
    found = fxguard.dependencies(Tokens(nn.Identity()), x)
    assert "128 of 299 cuts" in found.positions.evidence

    def ends(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-2], x[:, -1:], x[:, -1:]], 1)

    assert fxguard.dependencies(Tokens(Applied(ends)), x).positions.depends


def test_channels_first() -> None:
    """``[batch, channels, length]``: found by the convolution, or given."""
    model = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1))
    x = torch.randn(2, 3, 20)
    found = fxguard.dependencies(model, x)
    assert found.positions.depends
    assert "pads both sides" in found.positions.because
    model = nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(3, 3, 3))
    assert fxguard.dependencies(model, x).positions.depends is False
    assert fxguard.dependencies(model, x, positions=-1).positions.depends is False
    assert fxguard.dependencies(model, x, positions=1).positions.depends


def test_writes_are_followed() -> None:
    """A value that is written in its place, and one that shares its memory."""

    def writes(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(len(x)):
            out[i] = x[i]
        rows = out[1:]
        rows += x[:1]  # of the first sample
        return out

    found = fxguard.dependencies(Tokens(Applied(writes)), ids())
    assert found.samples.depends
    assert at_line(found.samples, "# of the first sample"), found


def everything() -> Dependencies:
    x = ids(padded=True)
    return fxguard.dependencies(Pooled(pooled), x, (x != 0).long())


def test_the_record() -> None:
    """Text, JSON by the schema, a page, a notebook."""
    found = everything()
    assert [each.question for each in found.found] == ["padding"]
    assert str(found) == repr(found) == "\n".join(found.verdict)
    data = json.loads(found.to_json())
    assert told("Dependencies", data) == []
    assert told("", data) == []
    assert data["padding"]["leak"]["title"] == "mean"
    assert data["samples"]["depends"] is False
    assert found.runs > 2
    assert "mean" in found._repr_html_()


def test_the_page(tmp_path: Any) -> None:
    """The answers, and the path with the lines of the program; what a name holds is escaped."""
    file = tmp_path / "page.html"
    everything().to_html(file)
    text = file.read_text()
    assert "<h1>Dependencies: Pooled</h1>" in text
    assert "return x.mean(1)  # over padding, too" in text
    assert 'class="marked"' in text
    assert "<script" not in text


def test_models_of_torch() -> None:
    """An encoder of ``nn.Transformer`` with padding hidden, and without."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = nn.TransformerEncoder(layer, 1).eval()

    class Encodes(nn.Module):
        def __init__(self, hides: bool) -> None:
            super().__init__()
            self.hides, self.encoder = hides, encoder

        def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
            hidden = key_padding_mask if self.hides else None
            return self.encoder(x, src_key_padding_mask=hidden)  # type: ignore[no-any-return]

    x, hidden = torch.randn(BATCH, LENGTH, WIDTH), ids(padded=True) == 0
    assert fxguard.dependencies(Encodes(hides=True), x, hidden).padding.depends is False
    found = fxguard.dependencies(Encodes(hides=False), x, hidden)
    assert found.padding.depends
    assert "no mask" in found.padding.because


def test_padding_where_dropout_draws() -> None:
    """Other lengths draw other numbers: then the contents of the padding are replaced."""

    class Drops(nn.Module):
        def __init__(self, hides: bool) -> None:
            super().__init__()
            self.hides = hides

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = F.dropout(x, 0.5, self.training)
            weights = mask if self.hides else torch.ones_like(mask)
            return (x * weights[..., None]).sum(1)

    x, mask = torch.randn(BATCH, LENGTH, 3), (ids(padded=True) != 0).float()
    assert fxguard.dependencies(Drops(hides=True), x, mask).padding.depends is False
    assert fxguard.dependencies(Drops(hides=False), x, mask).padding.depends


def test_two_sequences_with_padding_of_their_own() -> None:
    """What one mask tells is not cut from the other sequence."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, WIDTH)

        def forward(
            self, premise: Tensor, hypothesis: Tensor, premise_mask: Tensor, hypothesis_mask: Tensor
        ) -> Tensor:
            a = real_mean(self.embedding(premise), premise_mask)
            b = real_mean(self.embedding(hypothesis), hypothesis_mask)
            return torch.cat([a, b], 1)

    a, b = ids(padded=True), ids(padded=True).flip(0)
    masks = {"premise_mask": (a != 0).long(), "hypothesis_mask": (b != 0).long()}
    found = fxguard.dependencies(Pair(), a, b, **masks)
    assert found.padding.depends is False, found
    assert "by premise_mask" in found.padding.evidence


def test_an_input_that_is_constant_behind_the_end() -> None:
    """Segments are 1 there, and before: tokens are padded all the same."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.segment = nn.Embedding(20, WIDTH), nn.Embedding(2, WIDTH)

        def forward(self, tokens: Tensor, segments: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.segment(segments)
            scores = x @ x.transpose(1, 2)
            hidden = attention_mask[:, :, None] == 0  # of queries, and it should be that of keys
            return scores.masked_fill(hidden, -1e9).softmax(-1) @ x

    mask = (ids(padded=True) != 0).long()
    segments = (torch.arange(LENGTH) > 1).long().expand(BATCH, -1).clone()
    found = fxguard.dependencies(Segments(), ids(), segments, mask)
    assert found.padding.depends, found


def test_a_softmax_without_a_dimension() -> None:
    """``nn.Softmax()`` takes the first one of three."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fxguard.dependencies(Tokens(nn.Softmax()), ids())
    assert "without dim= it runs over dimension 0" in found.samples.because


def test_a_mask_that_branches_make() -> None:
    """Where a line of the class is not certain to be the one that ran, it is not named."""

    class Branches(nn.Module):
        def __init__(self, local: bool) -> None:
            super().__init__()
            hidden = torch.ones(LENGTH, LENGTH).triu(1) > 0
            if local:
                hidden = torch.ones(LENGTH, LENGTH).triu(3) > 0
            self.register_buffer("hidden", hidden)  # given here

        def forward(self, x: Tensor) -> Tensor:
            scores = (x @ x.mT).masked_fill(self.hidden, -math.inf)
            return scores.softmax(-1) @ x

    found = fxguard.dependencies(Tokens(Branches(local=True)), ids())
    assert at_line(found.positions, "# given here"), found
    assert fxguard.dependencies(Tokens(Branches(local=False)), ids()).positions.depends is False
