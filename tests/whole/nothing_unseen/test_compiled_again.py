"""What TorchDynamo compiles again and again is checked each time: sizes, dtypes, modes, tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch import observer
from fxguard.capture import dynamo
from support.cut_models import (
    HIGH,
    LOW,
    Bare,
    Block,
)
from support.ways import AOT, EAGER, WAYS, assert_same_bits, prepared, the_way


class Flattens(nn.Module):
    """Makes TorchDynamo compile for each size: a Python number is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).view(int(x.shape[0]), -1) * int(x.shape[0])


def pairs(sizes: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """A healthy and a faulty input of each size, that is to be compiled for by itself."""
    for size in sizes:
        pair = torch.full((size, 4), 0.5), torch.full((size, 4), 1e3)
        for x in pair:
            torch._dynamo.mark_static(x)
        yield pair


def check_many_sizes(sizes: Any, way: str = EAGER) -> str:
    """Every size, healthy and faulty; what `coverage` says in the end."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Flattens(), on_detect=reports.append)
    guarded, plain = prepared(model, way), Flattens()
    bad = []
    for clean, faulty in pairs(sizes):
        assert_same_bits(guarded(clean), plain(clean))
        bad.append(fxguard.guard_of(model).batch_number)
        assert_same_bits(guarded(faulty), plain(faulty))
    assert [report.batch_number for report in reports] == bad
    blamed = {r.origins[0].message.partition(" (")[0] for r in reports}
    assert blamed == {"exp in block made inf"}, blamed
    return fxguard.guard_of(model).coverage()


@pytest.mark.parametrize("limit", [1, 2])
def test_past_the_recompile_limit_every_forward_is_checked(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When TorchDynamo gives up, the observer sees what it leaves to Python."""
    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", limit)
    coverage = check_many_sizes(range(2, 7))
    assert f"in {limit} graph" in coverage
    assert "between graphs" in coverage


def test_below_the_recompile_limit_nothing_is_left_to_the_observer() -> None:
    """The clean twin: with room for all sizes each is a graph."""
    coverage = check_many_sizes(range(2, 7))
    assert "in 5 graphs" in coverage
    assert "between" not in coverage


def unobserved(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def test_without_the_observer_past_the_recompile_limit_the_check_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What TorchDynamo leaves to Python is seen by nobody else."""
    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", 1)
    monkeypatch.setattr(observer, "observe", unobserved)
    with pytest.raises(AssertionError, match=r"input `output`: 12 \+inf"):
        check_many_sizes(range(2, 7))


@pytest.mark.parametrize("way", [EAGER, AOT])
def test_changing_shapes(way: str) -> None:
    """Sizes that TorchDynamo turns into symbols are checked like the first one."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Bare(), on_detect=reports.append)
    guarded = prepared(model, way)
    for size in (3, 5, 1, 7, 0, 4):
        clean, faulty = torch.full((size, 4), 0.5), torch.full((size, 4), 1e3)
        assert_same_bits(guarded(clean), Bare()(clean))
        assert_same_bits(guarded(faulty), Bare()(faulty))
    assert [report.batch_number for report in reports] == [1, 3, 5, 7, 11]  # none of no elements


def check_changing_dtypes(way: str) -> None:
    reports: list[fxguard.types.Report] = []
    with the_way(way):
        plain = Bare()
        model = fxguard.instrument(copy.deepcopy(plain), on_detect=reports.append)
        guarded = prepared(model, way)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
            plain.to(dtype)
            model.to(dtype)
            reports.clear()
            assert_same_bits(guarded(LOW.to(dtype)), plain(LOW.to(dtype)))
            assert not reports
            assert_same_bits(guarded(HIGH.to(dtype)), plain(HIGH.to(dtype)))
            assert [(o.what, o.frame.name) for r in reports for o in r.origins] == [
                ("exp", "inner")
            ]
        with torch.no_grad():
            model.inner.linear.weight[0, 0] = torch.nan
        guarded(LOW.to(torch.float16))
    assert reports[-1].origins[0].what == "weight inner.linear.weight"


@pytest.mark.parametrize("way", WAYS)
def test_changing_dtypes(way: str) -> None:
    """One model, moved to another dtype with `to`, is checked in that one."""
    check_changing_dtypes(way)


@pytest.mark.parametrize("way", WAYS)
def test_train_and_eval_in_turns(way: str) -> None:
    """Both modes of one model are checked; the running statistics stay those of the plain model."""

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Block())

    reports: list[fxguard.types.Report] = []
    x = torch.arange(8.0).view(2, 4)
    with the_way(way):
        plain, model = make(), fxguard.instrument(make(), on_detect=reports.append)
        guarded = prepared(model, way)
        for mode in (True, False, True, False):
            outputs = []
            for one, called in ((plain, plain), (model, guarded)):
                torch.manual_seed(3)
                outputs.append(called(x) if one.train(mode) is one else None)
            assert_same_bits(outputs[1], outputs[0])
        assert_same_bits(model[0].running_var, plain[0].running_var)
        assert not reports
        for mode in (True, False):
            model.train(mode)
            with torch.no_grad():
                model[0].weight.fill_(1e4)
                model[0].bias.fill_(1e4)
            guarded(x)
    assert [report.batch_number for report in reports] == [4, 5]
    assert {report.origins[0].what for report in reports} == {"exp"}


# Many forwards of one call.


class Poison:
    """A logits processor: it spoils a weight when so many tokens have been chosen."""

    def __init__(self, weight: Tensor, after: int) -> None:
        self.weight, self.after, self.calls = weight, after, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            with torch.no_grad():
                self.weight[0, 0] = torch.nan
        return scores


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def test_every_token_is_a_batch() -> None:
    """With a growing cache the forward that is bad first is the one reported, with its number.

    Once the weight is healed the same model goes on, and chooses the tokens of the plain one.
    """
    model, plain = fxguard.instrument(llama()), llama()
    weight = model.model.layers[0].mlp.down_proj.weight
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    ids = torch.arange(1, 7).view(1, 6)
    poison = Poison(weight, after=2)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model.generate(ids, logits_processor=[poison], **options)
    report = caught.value.report
    assert report.batch_number == poison.calls == 2
    assert report.origins[0].what == "weight model.layers.0.mlp.down_proj.weight"
    model.load_state_dict(plain.state_dict())
    expected = plain.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert expected.shape[1] == 6 + 5
    assert fxguard.guard_of(model).batch_number == 3 + 5
