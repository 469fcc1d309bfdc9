"""One rule for a fix: when it applies, and how it is worded.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxguard.advice.case import Case
from fxguard.findings import Fix
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["Rule", "names_in"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One fix, and when it applies."""

    causes: str  # "underflow, rounding"
    names: frozenset[str] | None  # plain names of operations; None for any
    kind: str  # "exact" or "advice", as in :class:`~fxguard.findings.Fix`
    text: str  # `c` is the case: "{c.name}"
    fits: Callable[[Case], bool] = lambda case: True
    last: bool = False  # used only if nothing else applies
    alone: bool = False  # if it applies, nothing else is said
    # The same for the program's text, see :class:`~fxguard.findings.Fix`; `c` as above.
    rewrites: tuple[str, ...] = ()
    # The same for a run alone, and the operation that led to the origin and is rewritten there;
    # None for that of the origin itself.
    tries: tuple[str, ...] = ()
    maker: Callable[[Case], Step | None] = lambda case: None
    # Further words for the text, by name: of what the rule has found in the graph.
    words: Callable[[Case], Mapping[str, str]] = lambda case: {}

    def applies(self, case: Case) -> bool:
        """Whether the rule applies to an origin."""
        is_named = self.names is None or case.name in self.names
        return is_named and case.cause in self.causes.split(", ") and self.fits(case)

    def fix(self, case: Case) -> Fix:
        """The fix, worded for that origin."""
        rewrites = tuple(filter(None, (each.format(c=case) for each in self.rewrites)))
        tries = tuple(filter(None, (each.format(c=case) for each in self.tries)))
        text = self.text.format(c=case, **self.words(case))
        maker = self.maker(case)
        if maker is None:
            return Fix(self.kind, text, rewrites, tries=tries)
        return Fix(self.kind, text, rewrites, maker.source, plain(maker.kind), tries)


def names_in(text: str) -> frozenset[str]:
    """Names of operations, separated by spaces."""
    return frozenset(text.split())
