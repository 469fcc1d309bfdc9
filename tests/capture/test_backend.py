"""The backend around the user's own: how it measures there, and whom it finds around itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxguard.capture import backend
from fxguard.measure.ways import EAGER, INDUCTOR, TRACEABLE


def own_backend(graph_module: Any, inputs: Any) -> Callable[..., Any]:
    return graph_module.forward  # type: ignore[no-any-return]


def test_each_backend_has_its_way() -> None:
    """Inductor and eager have ways of their own, by name and as objects; all others share one."""
    wrapper = torch._TorchCompileInductorWrapper("max-autotune-no-cudagraphs", None, False)
    assert backend.way_under(torch._dynamo.lookup_backend("inductor")) is INDUCTOR
    assert backend.way_under(wrapper) is INDUCTOR
    assert backend.way_under(torch._dynamo.lookup_backend("eager")) is EAGER
    assert backend.way_under(torch._dynamo.lookup_backend("aot_eager")) is TRACEABLE
    assert backend.way_under(own_backend) is TRACEABLE
