"""Objects die anywhere, also in a call that TorchDynamo compiles: it compiles no finalizer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import convert_frame

import fxguard
from fxguard.capture.finalizers import when_gone


class Thing:
    """May be referred to weakly."""


class Net(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


held: list[Any] = []


@torch.compiler.disable(recursive=False)  # TorchDynamo looks at what it calls
def drop() -> None:
    held.clear()
    gc.collect()


def dropping(x: Tensor) -> Tensor:
    """Lets go of what is held, between two graphs."""
    y = x.sin()
    torch._dynamo.graph_break()
    drop()
    torch._dynamo.graph_break()
    return y + 1


@pytest.fixture
def compiled_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions that TorchDynamo compiles."""
    names: list[str] = []
    compile_frame = convert_frame._compile

    def spy(code: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(code.co_name)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", spy)
    yield names
    torch._dynamo.reset()


def names_torch() -> list[str]:
    """A frame that TorchDynamo compiles, because it mentions a module of torch."""
    return [each.__name__ for each in (torch._dynamo.config,)]


def test_a_finalizer_is_called_but_not_compiled(compiled_names: list[str]) -> None:
    found: list[list[str]] = []
    held.append(Thing())
    when_gone(held[0], lambda: found.append(names_torch()))
    torch.compile(dropping, backend="eager")(torch.ones(3))
    assert found == [["torch._dynamo.config"]]
    assert "names_torch" not in compiled_names
    assert "dropping" in compiled_names


def test_without_it_the_finalizer_would_be_compiled(compiled_names: list[str]) -> None:
    held.append(Thing())
    weakref.finalize(held[0], names_torch)
    torch.compile(dropping, backend="eager")(torch.ones(3))
    assert "names_torch" in compiled_names


def test_a_guarded_model_that_dies_there_is_let_go(compiled_names: list[str]) -> None:
    model = Net()
    fxguard.instrument(model)(torch.ones(2, 4))
    held.append(model)
    del model
    compiled_names.clear()
    torch.compile(dropping, backend="eager")(torch.ones(3))
    assert not held
    assert [name for name in compiled_names if "dropping" not in name] == []
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(Net.forward.__code__)
    assert all(entry.code is None for entry in entries)
