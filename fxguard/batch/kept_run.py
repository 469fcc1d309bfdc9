"""What one run of a graph leaves for its backward: its inputs, and the gradients that came in."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.graph.random_state import RandomState
from fxguard.graph.torch_settings import settings_now

__all__ = ["KeptRun", "differentiable_writes", "keep"]

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor

Arrived = Callable[["KeptRun"], object]


@dataclass(slots=True, eq=False)
class KeptRun:
    """A run of a graph whose backward has yet to come.

    The hooks on what the graph returned own it: it dies with the autograd graph.
    """

    event: GraphRun  # of its batch, which ends with the forward
    batch_number: int
    index: int  # of the event in its batch
    args: tuple[Any, ...] | None  # what the graph ran on; None where nobody may need them any more
    random_state: RandomState | None
    versions: tuple[int | None, ...]  # of the arguments, when the graph had run
    restore_settings: Callable[[], None]  # those of torch under which it ran
    # By position among the outputs, in the backward that runs now.
    incoming: dict[int, Tensor] = field(default_factory=dict)

    def let_go(self) -> None:
        """A backward has ended: keep nothing alive that nobody else needs.

        Another one may follow, through a graph that was retained.
        """
        self.incoming.clear()
        self.args = None if self.args is None else tuple(map(_let_go, self.args))

    def _arguments(self) -> tuple[Any, ...] | None:
        """What the graph ran on; None where some of it is gone."""
        args = self.args and tuple(x() if isinstance(x, weakref.ref) else x for x in self.args)
        return None if args is None or any(x is None for x in args) else args

    def is_unchanged(self) -> bool:
        """Whether nobody has written its arguments since."""
        args = self._arguments()
        return args is not None and tuple(map(_version, args)) == self.versions

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Torch's settings as they were in the forward, autocast among them."""
        restore = settings_now()
        try:
            self.restore_settings()
            yield
        finally:
            restore()

    def opened(self) -> GraphRun:
        """The run as it was before its batch was closed: it can run again."""
        return replace(self.event, args=self._arguments(), random_state=self.random_state)


def keep(
    run: GraphRun, outputs: Sequence[Any], batch_number: int, index: int, arrived: Arrived
) -> KeptRun | None:
    """Keep what a second run needs, and listen to the gradients of what the graph returned.

    The nodes of autograd are hooked, not the tensors: users do not see it.

    Args:
        run: of the graph, which has returned.
        outputs: what it returned.
        batch_number: of the batch that it is a part of.
        index: of the event in that batch.
        arrived: called in the backward, when gradients have come in.

    Returns:
        None where nothing that it returned requires a gradient.
    """
    positions: dict[Any, list[int]] = {}  # node of autograd to outputs
    for position, output in enumerate(outputs):
        if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
            positions.setdefault(output.grad_fn, []).append(position)
    if not positions:
        return None
    args = run.args
    assert args is not None
    if any(args[position] is run.live[position] for position in differentiable_writes(run)):
        args = None  # nobody has copied what it held: no second run could begin as this one did
    kept = KeptRun(
        event=run,
        batch_number=batch_number,
        index=index,
        args=args,
        random_state=run.random_state,
        versions=() if args is None else tuple(map(_version, args)),
        restore_settings=settings_now(),
    )
    for node, found in positions.items():
        numbers = [(outputs[position].output_nr, position) for position in found]
        node.register_prehook(_listener(kept, numbers, arrived))
    return kept


def differentiable_writes(run: GraphRun) -> list[int]:
    """Positions of the arguments that a run has written and that have a gradient."""
    return [position for position, _ in run.plan.written if run.live[position].requires_grad]


def _listener(
    kept: KeptRun, numbers: Sequence[tuple[int, int]], arrived: Arrived
) -> Callable[[Sequence[Tensor | None]], None]:
    def listen(gradients: Sequence[Tensor | None]) -> None:
        if torch.compiler.is_compiling():  # compiled autograd: nothing is kept
            return
        for number, position in numbers:
            gradient = gradients[number]
            if gradient is not None and not is_functorch_wrapped_tensor(gradient):
                kept.incoming[position] = gradient.detach()
        arrived(kept)

    return listen


def _let_go(value: Any) -> Any:
    is_kept = not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter)
    return value if is_kept else weakref.ref(value)


def _version(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version
