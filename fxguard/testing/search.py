"""Searches for an input that overflows, and makes it as small as possible."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from fxguard import trees
from fxguard.errors import UsageError
from fxguard.forgiving import theirs
from fxguard.guard.guard import GuardedModel
from fxguard.report.display import Display, Displayed
from fxguard.report.report import Report
from fxguard.report.strict_json import recorded, strict_json
from fxguard.testing.watch import Model, as_call, call, on_loan

__all__ = ["Overflow", "find_overflow"]


@dataclass(frozen=True, repr=False)
class Overflow(Displayed):
    """An input with which an operation overflows or makes a NaN."""

    inputs: Any  # as the strategy drew it
    report: Report
    seed: int  # that finds it again
    runs: int  # calls of the model that the search and the shrinking took

    def __str__(self) -> str:
        head = f"found in {self.runs} runs with seed {self.seed}:"
        return "\n".join([head, *(f"  {text}" for text in self._inputs()), *self.report.verdict])

    __repr__ = __str__  # what pytest shows of `assert find_overflow(...) is None`

    @property
    def verdict(self) -> list[str]:
        """How the input was found, what it is, and what it leads to, in lines."""
        return str(self).splitlines()

    def _inputs(self) -> list[str]:
        """``inputs[0] = torch.full((4,), 256.0, dtype=torch.float16)``, for each leaf."""
        leaves, _ = trees.tree_flatten_with_path(self.inputs)
        return [f"inputs{trees.keystr(path)} = {_text(leaf)}" for path, leaf in leaves]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts, lists, strings and numbers; the inputs are shown as text."""
        data = {
            "inputs": self._inputs(),
            "seed": self.seed,
            "runs": self.runs,
            "report": self.report.to_dict(),
            "verdict": self.verdict,
        }
        return recorded("overflow", data)

    def to_json(self, indent: int | None = None) -> str:
        """The result as strict JSON: NaN and infinities are the strings "nan", "inf", "-inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of its report.

        Args:
            path: path of the file; overwritten if it exists.
        """
        self.report.to_html(path)

    def _display(self) -> Display:
        return replace(self.report._display(), verdict=self.verdict, name="overflow")


def find_overflow(
    model: Model,
    strategy: SearchStrategy[Any],
    *,
    max_examples: int = 200,
    seed: int | None = None,
    strict: bool = True,
    ignore: Iterable[str] = (),
    gradients: bool = False,
) -> Overflow | None:
    """Look for an input with which an operation of a model overflows, and shrink it.

    The search prefers inputs that bring an operation nearer to the largest number of its dtype
    (hypothesis' ``target``). Bad values in an input itself are not blamed on the model.

    Args:
        model: any module, or a function of tensors.
        strategy: draws a batch: a dict is passed by name, a tuple or list by position, anything
            else as the only argument.
        max_examples: how many inputs to try before giving up.
        seed: repeats a search; a new one if not given. It is printed.
        strict: as for :func:`fxguard.testing.assert_finite`.
        ignore: likewise.
        gradients: likewise.

    Returns:
        The smallest input that was found, with its report, or None.

    Raises:
        FxguardError: when ``strategy`` is not a strategy.

    Example:
        >>> def test_norm():
        ...     assert find_overflow(norm, tensors(torch.float16, (4, 64), max_value=1e4)) is None
        assert found in 54 runs with seed 1234:
          inputs = torch.full((4, 64), 256.0, dtype=torch.float16)
        pow made inf (norm.py:12)
          ... is None
    """
    if not isinstance(strategy, SearchStrategy):
        raise UsageError(
            f"find_overflow draws its inputs from a strategy, and got a {type(strategy).__name__}: "
            "give it like(batch) or tensors(dtype, shape); assert_finite takes one batch"
        )
    seed = random.getrandbits(32) if seed is None else seed
    best: list[tuple[Any, Report]] = []
    runs = 0
    options = {"strict": strict, "ignore": tuple(ignore), "backward": gradients}
    with on_loan(model, **options) as (called, guard, reports):

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max_examples,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.target, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )
        @hypothesis.given(strategy)
        def search(inputs: Any) -> None:
            nonlocal runs
            runs += 1
            reports.clear()
            args, kwargs = as_call(inputs)
            try:
                call(called, args, kwargs, backward=gradients)
            except theirs():  # a bad value may lead to one in the model
                if not reports:
                    raise
            if reports and reports[0].origins[0].is_operation:
                best[:] = [(inputs, reports[0])]
                raise _FoundError
            if (largest := _largest(guard)) > 0:
                hypothesis.target(math.log2(largest))

        with contextlib.suppress(_FoundError):
            search()
    outcome = f"{runs} runs, {'nothing' if not best else best[0][1].origins[0].message}"
    print(f"find_overflow: seed {seed}, {outcome}")
    return Overflow(*best[0], seed, runs) if best else None


class _FoundError(Exception):
    """Tells hypothesis that an input is one that the search looks for."""


def _largest(guard: GuardedModel) -> float:
    """The largest finite magnitude that an operation of the last batch read or made."""
    rows = [row for frame in guard.frames() for row in frame.rows]
    finite = [row.abs_max for row in rows if row.abs_max is not None and math.isfinite(row.abs_max)]
    return max(finite, default=0.0)


def _text(leaf: Any) -> str:
    if isinstance(leaf, Tensor) and leaf.numel() > 1 and bool((leaf == leaf.flatten()[0]).all()):
        return f"torch.full({tuple(leaf.shape)}, {leaf.flatten()[0].item()}, dtype={leaf.dtype})"
    return repr(leaf).replace("\n", "\n    ")
