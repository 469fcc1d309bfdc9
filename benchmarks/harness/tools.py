"""What is compared: the plain model and each tool that looks for inf and NaN in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxguard

__all__ = [
    "COMPILED",
    "EAGER",
    "FXGUARD",
    "MODES",
    "PLAIN",
    "REPLAY",
    "SAMPLED",
    "TOOLS",
    "Tool",
    "absent",
]

Prepare = Callable[[nn.Module], Any]

PLAIN = "plain"
FXGUARD = "fxguard"
REPLAY = "fxguard replay"
SAMPLED = "fxguard full_every=100"

# How a model is run: None is eager, else the `mode` of torch.compile.
MODES: dict[str, str | None] = {
    "eager": None,
    "inductor": "default",
    "reduce-overhead": "reduce-overhead",
    "max-autotune": "max-autotune",
}
EAGER = frozenset({"eager"})
COMPILED = frozenset(MODES) - EAGER


@dataclass(frozen=True, slots=True)
class Tool:
    """One way to run a model.

    Attributes:
        name: what the tables call it.
        prepare: changes a copy of the model that is the tool's own, before it is compiled.
        around: what each call runs in.
        modes: where it is compared.
        options: further options for Inductor.
        training_only: it does nothing in a forward alone.
        note: what a reader of the tables should know.
    """

    name: str
    prepare: Prepare = lambda model: model
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    modes: frozenset[str] = EAGER | COMPILED
    options: tuple[tuple[str, bool], ...] = ()
    training_only: bool = False
    note: str = ""

    def build(self, model: nn.Module, mode: str) -> Any:
        """The model as this tool runs it in this mode."""
        prepared = self.prepare(model)
        if mode in EAGER:
            return prepared
        options = torch._inductor.list_mode_options(MODES[mode]) | dict(self.options)
        return torch.compile(prepared, options=options)


def hook_debugger(model: nn.Module) -> nn.Module:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    return model


@contextmanager
def debug_mode() -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes():
        yield


def compiled_by_dynamo(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def with_sums(model: nn.Module) -> Any:
    """The model captured by TorchDynamo, with a sum over each floating-point tensor it makes."""

    def backend(captured: GraphModule, _: list[Any]) -> Callable[..., Any]:
        seen = set()
        for node in list(captured.graph.nodes):
            value = node.meta.get("example_value")
            if not isinstance(value, Tensor):
                continue
            memory = value.untyped_storage()._cdata
            if node.op.startswith("call") and memory not in seen and value.is_floating_point():
                with captured.graph.inserting_after(node):
                    captured.graph.call_function(total, (node,))
            seen.add(memory)  # a view has the values of what it is a view of
        captured.recompile()
        return captured.forward

    return torch.compile(model, backend=backend)


def total(value: Tensor) -> Tensor:
    return value.detach().sum()


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(PLAIN),
        Tool(
            "plain again",
            note="a second copy of the plain model: how far from 1 chance alone gets",
        ),
        Tool(FXGUARD, fxguard.instrument),
        Tool(
            REPLAY,
            lambda model: fxguard.instrument(model, replay=True),  # type: ignore[call-arg]
        ),
        Tool(
            SAMPLED,
            lambda model: fxguard.instrument(model, full_every=100),
            modes=COMPILED,
            note="every operation in each 100th call, and else what leaves a graph",
        ),
        Tool(
            "torch.compile eager",
            compiled_by_dynamo,
            modes=EAGER,
            note="torch.compile(model, backend='eager'): what capturing alone costs or saves",
        ),
        Tool(
            "torch.sum",
            with_sums,
            modes=EAGER,
            note="captured likewise, and each value that is made is summed: one read of it",
        ),
        Tool(
            "DebugUnderflowOverflow",
            hook_debugger,
            note="of transformers; modules only, and no backward",
        ),
        Tool(
            "detect_anomaly",
            around=lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
            training_only=True,
            note="of torch.autograd; looks at backward only, for NaN only",
        ),
        Tool(
            "DebugMode",
            around=debug_mode,
            modes=EAGER,
            note="of torch.utils, with log_tensor_hashes(): of its options the closest to looking "
            "at numbers, the L1 norm of the result of every operation, backward included",
        ),
        Tool(
            "nan_asserts",
            modes=COMPILED,
            options=(("nan_asserts", True),),
            note="of Inductor; inputs and outputs of each captured graph",
        ),
    )
}


def absent(tool: Tool) -> str:
    """Why a tool cannot be compared here, or nothing."""
    options = {REPLAY: "replay", SAMPLED: "full_every"}
    option = options.get(tool.name)
    if option and option not in inspect.signature(fxguard.instrument).parameters:
        return f"this version of fxguard.instrument has no option `{option}`"
    return ""
