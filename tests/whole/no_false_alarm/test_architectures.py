"""Healthy runs of the architectures that transformers offers: fxguard reports none of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from support import zoo
from support.configurations import ARCHITECTURES, SKIPPED, Architecture, inputs_of
from support.every_operation import Comparison


@dataclass(frozen=True)
class Variant:
    """How a model is run.

    Masks: "right" and "left" hide padding; "causal" is added to the scores of attention and holds
    the lowest number of the dtype, "infinite" is the same with -inf.
    """

    dtype: torch.dtype
    attention: str
    mask: str = ""
    train: bool = False

    def __str__(self) -> str:
        words = (str(self.dtype)[6:], self.attention, self.mask, "train" if self.train else "")
        return "-".join(filter(None, words))


VARIANTS = (
    Variant(torch.float32, "sdpa", train=True),
    Variant(torch.bfloat16, "eager", "right"),
    Variant(torch.float16, "sdpa", "left"),
    Variant(torch.float16, "eager", "right"),
    Variant(torch.float16, "eager", "infinite"),
    Variant(torch.bfloat16, "sdpa", "causal"),
    Variant(torch.float32, "flex_attention", "right"),
    Variant(torch.float16, "sdpa", train=True),
    Variant(torch.bfloat16, "sdpa", train=True),
    Variant(torch.bfloat16, "eager", "infinite"),
    Variant(torch.float16, "eager", "causal"),
    Variant(torch.bfloat16, "flex_attention", "right"),
)

# What CI runs: architecture, variants. The campaign runs every variant of every architecture.
SAMPLE = {
    "albert": "bfloat16-eager-right",
    "audio-spectrogram-transformer": "float32-sdpa-train",
    "beit": "float16-eager",
    "bloom": "float16-eager-right",
    "convnext": "bfloat16-eager",
    "deberta-v2": "float16-eager-right",
    "deepseek_v3": "bfloat16-sdpa-causal",
    "distilbert": "float32-sdpa-train",
    "falcon": "bfloat16-eager-right",
    "fnet": "float32-eager-train",
    "gpt_oss": "bfloat16-eager-right",
    "hubert": "float16-sdpa-right",
    "mamba": "float32-eager-train",
    "mistral": "float16-eager-infinite",
    "modernbert": "bfloat16-eager-right",
    "opt": "float16-sdpa-left",
    "qwen3_moe": "bfloat16-sdpa-causal",
    "rwkv": "bfloat16-eager-right",
    "speech_to_text": "float16-eager-right",
    "xlnet": "float16-eager-right",
}


def offered_by(architecture: Architecture, variant: Variant) -> Variant | None:
    """The variant as an architecture offers it: with the nearest attention and mask that it has."""
    if not architecture.offers(variant.attention):
        if variant.attention == "flex_attention":
            return None
        variant = replace(variant, attention="eager")
    if variant.mask:
        kinds = filter(architecture.masks, (variant.mask, "right"))
        variant = replace(variant, mask=next(kinds, ""))
    return variant


def variants_of(architecture: Architecture) -> dict[str, tuple[Variant, Variant]]:
    """The variants that an architecture has, each once: the first that asks for it, and itself."""
    found: dict[str, tuple[Variant, Variant]] = {}
    for variant in VARIANTS:
        offered = offered_by(architecture, variant)
        if offered is not None:
            found.setdefault(str(offered), (variant, offered))
    return found


# Weights that make queries and keys.
SCORES = re.compile(r"(^|[._])(c_attn|k|kv|key|q|qk|qkv|query|query_key_value|Wqkv)([._]|$)")


def build(architecture: Architecture, variant: Variant) -> nn.Module:
    """A model that attends as sharply as a trained one: masked scores pass float16's lowest."""
    torch.manual_seed(0)
    model = architecture.model_class()._from_config(
        architecture.config(), attn_implementation=variant.attention
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if SCORES.search(name):
                parameter *= 32
    return model.to(variant.dtype).train(variant.train)


def run(model: nn.Module, batch: dict[str, Tensor], train: bool) -> list[Tensor]:
    """The outputs of one seeded forward and, in training, the gradients of all weights."""
    torch.manual_seed(7)
    np.random.seed(7)  # audio models mask parts of what they hear when they train
    with torch.set_grad_enabled(train):
        outputs = zoo.tensors_in(model(**batch))
    found = [x for x in outputs if x.requires_grad and x.is_floating_point()]
    if found:
        # A plain sum has no gradient behind a softmax or a layer norm.
        signs = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in found]
        model.zero_grad()
        losses = [(x.float() * sign).sum() for x, sign in zip(found, signs, strict=True)]
        torch.stack(losses).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(x.detach() for x in outputs), *gradients]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two runs agree in every bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


# TorchDynamo cannot trace their arithmetic with numpy scalars: the observer checks them.
LEFT_TO_PYTHON = frozenset({"pegasus_x"})


def guarded_by(
    model: nn.Module, reports: list[fxguard.types.Report], comparison: Comparison | None
) -> nn.Module:
    """An instrumented model, of which each operation may be compared as well."""
    hear = comparison.hear if comparison is not None else None
    GuardedModel(model, Options(on_detect=reports.append), Plugins(hear=hear)).install()
    return model


def healthy_run(
    architecture: Architecture,
    variant: Variant,
    record: Callable[[str, object], None],
    comparison: Comparison | None = None,
) -> str:
    """One run with fxguard next to one without. Says why there is none, if so.

    Args:
        architecture: of the model.
        variant: how it is run.
        record: hears what was found.
        comparison: of every operation with the same in float64, where it is wanted.
    """
    try:
        guarded = build(architecture, variant)
    except ValueError as error:  # a part of it that the whole did not ask
        if "does not support an attention implementation" not in str(error):
            raise
        return f"does not offer {variant.attention}"
    batch = inputs_of(architecture, guarded, variant.dtype, variant.mask, variant.train)

    def plain(compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model = build(architecture, variant)
        if compiled:
            model = torch.compile(model, backend="eager")
        return run(model, batch, variant.train)

    try:
        # In Python flex_attention would generate code, and take its time.
        expected = plain(compiled=variant.attention == "flex_attention")
    except Exception as error:
        return f"raises {type(error).__name__} by itself"
    if not all(bool(output.isfinite().all()) for output in expected):
        return "makes inf or NaN by itself"

    torch._dynamo.reset()
    reports: list[fxguard.types.Report] = []
    guarded_by(guarded, reports, comparison)
    try:
        try:
            actual = run(guarded, batch, variant.train)
        except (torch._dynamo.exc.TorchRuntimeError, AssertionError) as error:
            # Python's path has an operation that TorchDynamo fails on, such as grouped_mm, or a
            # function that it does not trace: for users it is left to Python, and so it is here.
            if isinstance(error, AssertionError) and "forbidden callable" not in str(error):
                raise
            guarded_by(fxguard.remove(guarded), reports, comparison)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GuardedModel, "fallback", True)
                actual = run(guarded, batch, variant.train)
    except Exception:
        try:
            plain(compiled=True)
        except Exception as error:
            return f"raises {type(error).__name__} under torch.compile by itself"
        raise
    guard = fxguard.guard_of(guarded)
    not_judged = sum(bool(note.not_judged) for note in guard.notes)
    counts = (len(guard.notes), not_judged, len(reports))
    record("healthy run", (architecture.name, str(variant), *counts))
    assert not reports, "\n".join(map(str, reports))
    coverage = re.match(r"checked (\d+) of", guard.coverage())
    assert coverage is not None
    assert int(coverage[1]) > 5
    assert actual
    # TorchDynamo may take another path than Python does, and then its results are the right ones.
    # Reformer seeds its hashes from the clock when it trains: no two runs of it are alike.
    assert (
        same(expected, actual)
        or same(plain(compiled=True), actual)
        or not same(plain(compiled=False), plain(compiled=False))
    )
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name, variants in SAMPLE.items() for variant in variants.split()],
)
def test_healthy_runs_are_not_reported(
    name: str, variant: str, record_property: Callable[[str, object], None]
) -> None:
    """A model in a low precision, with masks and in training, is checked and nothing is found."""
    architecture = ARCHITECTURES[name]
    assert healthy_run(architecture, variants_of(architecture)[variant][1], record_property) == ""


@pytest.mark.slow
def test_the_list_of_what_is_left_out_is_short(
    record_property: Callable[[str, object], None],
) -> None:
    """Each with its reason, printed when the tests end."""
    for reason, names in SKIPPED.items():
        record_property("left out", (reason, len(ARCHITECTURES), names))
        assert set(names.split()) <= ARCHITECTURES.keys()
    assert sum(len(names.split()) for names in SKIPPED.values()) < 0.05 * len(ARCHITECTURES)


# Scores that pass float16's limit, because these tests sharpen attention: 334 * 326 and more.
TRUE_OVERFLOWS = {("dots3_note", torch.float16): "matmul: overflow"}


@pytest.mark.campaign
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(
    name: str,
    variant: Variant,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every variant of every architecture: nothing is found in what is healthy without fxguard.

    Every operation is compared with the same in float64, and none is called an overflow or an
    underflow.
    """
    for reason, names in SKIPPED.items():
        if name in names.split():
            pytest.skip(reason)
    monkeypatch.setattr(GuardedModel, "fallback", name in LEFT_TO_PYTHON)
    architecture = ARCHITECTURES[name]
    offered = dict(variants_of(architecture).values())
    if variant not in offered:
        pytest.skip("not offered, or the same as another variant")
    comparison = Comparison()
    if reason := healthy_run(architecture, offered[variant], record_property, comparison):
        record_property("no healthy run", (name, str(offered[variant]), reason))
        pytest.skip(reason)
    counted = (
        *(comparison.compared, comparison.masks, sum(comparison.vanished.values())),
        dict(comparison.not_judged),
    )
    record_property("every operation", counted)
    true = TRUE_OVERFLOWS.get((name, variant.dtype), "")
    assert [called for called in comparison.called if called != true] == []
