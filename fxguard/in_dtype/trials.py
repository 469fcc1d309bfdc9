"""Runs a model in another dtype as often as needed, each time from the same start."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.capture.keeping import Keeping
from fxguard.errors import UsageError
from fxguard.forgiving import theirs
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import converted, is_float
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.in_dtype.errors import Error, Wanted
from fxguard.install.captures import Hear
from fxguard.install.instrumented import find_installed
from fxguard.install.keeper import Keeper
from fxguard.install.remove import remove
from fxguard.measure.at_hand import name_of_dtype
from fxguard.options import Options

__all__ = ["FLOAT8", "Loss", "Trials", "loss_of", "outputs_of", "pairs_of", "tensors_of"]

Loss = Callable[[Any], Tensor] | str | int

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Trials:
    """A copy of a model in a dtype, with its inputs.

    In float8 only matrix products compute: then the copy keeps the model's own dtype and runs in
    it, as it does under autocast.

    Args:
        model: the model in its own dtype.
        args: its positional arguments.
        kwargs: its keyword arguments.
        dtype: the other one; None for its own.
        loss: a function of what the model returns, or the name of the loss in it; None for a
            forward alone.
        autocast: whether the model runs under autocast to that dtype.

    Attributes:
        asked: the dtype that was asked for; None for the model's own.
        mix: how the copy runs in the dtype, as code of the user's.
        runs: how often the model or its copy has run.
    """

    def __init__(
        self,
        model: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype | None,
        loss: Loss | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        self.loss = loss
        self.autocast = autocast
        self.model = model
        self.asked = dtype
        self.dtype = coarsest((model, args, kwargs)) if dtype is None else dtype
        self.runs = 0
        self.given = (args, kwargs)
        low = copy.deepcopy(model)
        _make_plain(low)
        self.float8 = dtype if dtype in FLOAT8 else None
        self.converts = not autocast and dtype is not None and self.float8 is None
        self.low = low.to(dtype) if self.converts else low
        self.device = next((x.device.type for x in tensors_of(low).values()), "cpu")
        self.mix = f"model.to({dtype})"
        if autocast:
            self.mix = f"torch.autocast({self.device!r}, {self.dtype})"
        self.wanted = Wanted()  # outputs in float64, and gradients in the model's own dtype
        self.keeping = Keeping(())
        self.keeper = Keeper(self.low, self.keeping)
        self._buffers = {name: x.clone() for name, x in self.low.named_buffers()}

    @property
    def unit(self) -> float:
        """The unit of roundoff of the dtype."""
        return torch.finfo(self.dtype).eps / 2

    def on(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Trials:
        """The same with other inputs."""
        args, kwargs = given
        return Trials(self.model, args, kwargs, self.asked, self.loss, autocast=self.autocast)

    @property
    def with_gradient(self) -> list[str]:
        """The names of the weights that ask for a gradient."""
        return [name for name, x in self.low.named_parameters() if x.requires_grad]

    def heard(self, given: Any, hear: Hear, globs: Collection[str] = ()) -> tuple[Any, int]:
        """Run the copy under a guard, with a listener for each graph that has run.

        Args:
            given: its arguments, see :meth:`start`.
            hear: the listener.
            globs: operations that are kept in float32.

        Returns:
            What the copy returned, and how many operations ran between graphs.
        """
        options = Options(on_detect=lambda report: None, backward=False)
        guard = GuardedModel(self.low, options, Plugins(hear=hear))
        guard.captures.keep(Keeping(tuple(globs)))
        guard.install()
        try:
            with torch.no_grad(), random_state_kept(given):
                output = self._call(self.low, given)
        finally:
            guard.uninstall()
        return output, guard.counted().between

    def error(self, globs: Collection[str], enough: Error | None = None) -> Error:
        """The error of the copy with operations kept in float32.

        Args:
            globs: which ones.
            enough: if outputs are worse than this error, gradients no longer matter.
        """
        with self.kept(globs):
            if enough is not None and self.loss is not None:
                error = self.distance(self.run(self.low, self.start())[0])
                if not error.is_as_good(enough, torch.finfo(self.dtype).eps):
                    return error
            return self.distance(*self.run(self.low, self.start(), self.loss))

    @contextlib.contextmanager
    def kept(self, globs: Collection[str]) -> Iterator[None]:
        """A block in which operations of the copy are kept in float32."""
        self.keeping.globs = tuple(globs)
        self.keeper.install()
        try:
            yield
        finally:
            self.keeper.put_away()

    def returned(
        self,
        given: Any = None,
        seen_by: Callable[[Any], contextlib.AbstractContextManager[object]] | None = None,
    ) -> Any:
        """What the copy returns, without gradients.

        Args:
            given: other inputs than its own, in the model's own dtype.
            seen_by: makes a block around the run from what the copy is given.
        """
        given = self.start(given)
        around = contextlib.nullcontext() if seen_by is None else seen_by(given)
        with torch.no_grad(), random_state_kept(given), around:
            return self._call(self.low, given)

    def plain(self) -> tuple[Module, Any]:
        """A copy of the model in its own dtype, with writable buffers, and its inputs."""
        model = copy.deepcopy(self.model)
        _make_plain(model)
        return model, trees.tree_map_only(Tensor, torch.clone, self.given)

    def _plain_output(self) -> Any:
        model, (args, kwargs) = self.plain()
        self.runs += 1
        with torch.no_grad(), random_state_kept((args, kwargs)):
            return model(*args, **kwargs)

    def in_float64(self) -> Any:
        """What the model returns in float64, with floating-point inputs in float64.

        None if it does not run in it: it was not written for that, or does not fit.
        """
        model, given = self.plain()
        try:
            given = converted(given, torch.float64)
            with torch.no_grad(), random_state_kept(given):
                return self._call(model.double(), given)
        except theirs():  # an operation without a float64 kernel
            return None

    def distance(
        self, outputs: Sequence[Tensor], gradients: Mapping[str, Tensor] | None = None
    ) -> Error:
        """The error of outputs against float64, and of gradients against the model's own."""
        return self.wanted.distance(outputs, gradients or {})

    def start(self, given: Any = None) -> Any:
        """Reset the copy to its start, and return its inputs.

        Args:
            given: other ones than its own, in the model's own dtype.
        """
        given = self.given if given is None else given
        with torch.no_grad():
            for name, buffer in self.low.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])
        given = converted(given, self.dtype) if self.converts else given
        # The model may write its inputs.
        return trees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)

    def _in_dtype(self, model: Module) -> contextlib.AbstractContextManager[object]:
        if self.autocast and model is self.low:
            return torch.autocast(self.device, self.dtype)
        return contextlib.nullcontext()

    def run(
        self, model: Module, given: Any, loss: Loss | None = None, scale: float = 1.0
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """What a model returns, and the gradients of its weights if there is a loss.

        Args:
            model: the copy, or one in the model's own dtype.
            given: its arguments.
            loss: see :class:`Trials`.
            scale: a factor of the loss.
        """
        with torch.set_grad_enabled(loss is not None), random_state_kept(given):
            output = self._call(model, given)
            gradients = {}
            if loss is not None:
                weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
                found = torch.autograd.grad(
                    loss_of(output, loss) * scale, list(weights.values()), allow_unused=True
                )
                pairs = zip(weights, found, strict=True)
                gradients = {name: x for name, x in pairs if x is not None}
        return outputs_of(output), gradients

    def _call(self, model: Module, given: Any) -> Any:
        self.runs += 1
        try:
            with self._in_dtype(model):
                return model(*given[0], **given[1])
        except RuntimeError as error:
            name, dtype = type(self.model).__name__, name_of_dtype(self.dtype)
            raise UsageError(f"{name} does not run in {dtype}: {error}") from error


def coarsest(values: tuple[Module, Any, Any]) -> torch.dtype:
    """The dtype with the fewest digits among the weights and the inputs of a model."""
    model, *given = values
    tensors = [x for x in (*model.parameters(), *trees.tree_leaves(given)) if is_float(x)]
    real = [x.dtype.to_real() for x in tensors]
    return max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.get_default_dtype())


def outputs_of(output: Any) -> list[Tensor]:
    """The floating-point tensors that a model returned, in order."""
    found = [x for x in trees.tree_leaves(output) if is_float(x)]
    return [x.detach() if x.requires_grad else x for x in found]


def loss_of(output: Any, loss: Loss) -> Tensor:
    """The loss of what a model returned.

    Raises:
        FxguardError: when it is not a single number that can be differentiated.
    """
    found: Any
    if callable(loss):
        found = loss(output)
    elif isinstance(loss, str) and hasattr(output, loss):
        found = getattr(output, loss)
    else:
        found = output[loss]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"the loss has to be one number that has a gradient, and is of {what}")
    return found


def _make_plain(model: Module) -> None:
    while find_installed(model) is not None:
        remove(model)


def tensors_of(model: Module) -> dict[str, Tensor]:
    """The weights and buffers of a model, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def pairs_of(low: Any, given: Any) -> list[tuple[Tensor, Tensor]]:
    """Each floating-point tensor of the inputs, in the dtype and in its original form."""
    leaves = zip(trees.tree_leaves(low), trees.tree_leaves(given), strict=True)
    return [pair for pair in leaves if is_float(pair[0])]
