"""Keeps operations in float32 in a model that is not watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from fxguard.batch.events import GraphRun
from fxguard.batch.model_reference import reference_to
from fxguard.capture import dynamo
from fxguard.capture.keeping import Keeping, seen_from_outside
from fxguard.errors import FxguardError
from fxguard.install.captures import Captures
from fxguard.install.installation import Installation
from fxguard.install.instrumented import INSTALLED, find_installed
from fxguard.install.methods import Methods
from fxguard.install.names import Names

__all__ = ["Keeper", "kept_in"]


class Keeper:
    """Keeps operations of one model in float32 without checking anything.

    Args:
        model: the model.
        keeping: the operations.
    """

    checks = False
    keeps = True
    fallback = True  # code that TorchDynamo fails to capture runs unchanged

    def __init__(self, model: Module, keeping: Keeping) -> None:
        self.reference = reference_to(model)
        self.keeping = keeping
        self.installation = Installation(model, Methods())
        self.names = Names(model, lambda: None)
        self.captures = Captures(self.installation, self.names, _ignore, checks=False)
        self.captures.keep(keeping)
        self.unchecked_calls: Counter[str] = Counter()  # reason to the number of calls

    @property
    def model(self) -> Module:
        """The model, which is not kept alive."""
        return self.names.model

    def keep(self, keeping: Keeping) -> None:
        """Keep other operations from now on."""
        self.keeping = keeping
        self.captures.keep(keeping)

    def install(self) -> None:
        """Put the keeper in front of the model's methods."""
        if self.installation.put(self):
            self.captures.forget_forms()

    def uninstall(self) -> None:
        """Remove the keeper from the model's methods."""
        self.put_away()
        self.captures.clear()

    def put_away(self) -> None:
        """Remove the keeper, but keep the captured graphs for the next :meth:`install`."""
        self.installation.take_away()

    def run(self, method: str, outer: dynamo.OuterCompiler | None, args: Any, kwargs: Any) -> Any:
        """One call of the model."""
        if not self.names.modules:
            self.names.read()
        form = self.captures.form_of(method, outer, lambda: (), fallback=self.fallback)
        output = form.bound(self.names.model)(*args, **kwargs)
        self.captures.expect_kept()
        return output

    def compiled_around(self, inner: dynamo.Backend) -> dynamo.Backend:
        """The backend for a graph that holds the model and the code compiled around it.

        Args:
            inner: the backend that the graph was meant for.
        """
        return self.captures.around(inner, _ignore)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        twin = Keeper(memo.get(id(self.model), self.model), self.keeping)
        memo[id(self)] = twin
        INSTALLED.add(twin)
        twin.installation.stands_in_for_copy(twin, self.installation, memo)
        return twin

    def __reduce__(self) -> Any:
        raise FxguardError(
            "what keeps operations in float32 cannot be pickled; save the model's state_dict, or "
            "call fxguard.remove(model) first"
        )


def kept_in(model: Module) -> Keeping | None:
    """The operations kept in float32 in a model and its parts; None if there are none.

    A graph of the whole model includes its parts, and nobody else rewrites the graph.
    """
    if not any(isinstance(each, Keeper) for each in INSTALLED):
        return None  # the guard of a script asks at each call
    globs = tuple(
        each
        for name, module in model.named_modules()
        if isinstance(keeper := find_installed(module), Keeper)
        for glob in keeper.keeping.globs
        for each in seen_from_outside(glob, name)
    )
    return Keeping(globs) if globs else None


def _ignore(run: GraphRun, outputs: Sequence[Any] | None) -> None:
    """Nobody hears of the runs of these graphs."""
