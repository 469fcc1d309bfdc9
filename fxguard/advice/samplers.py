"""What is done about a sampler that compares a probability with a uniform random number."""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.source.acceptance import acceptance_in

__all__ = ["is_of_sampler", "words_of_acceptance"]


def is_of_sampler(case: Case) -> bool:
    """Whether the program of an operation accepts proposals by chance."""
    source = case.around.step.source
    return source is not None and acceptance_in(source.file) is not None


def words_of_acceptance(case: Case) -> Mapping[str, str]:
    """The probability with which a sampler accepts a proposal, and its line."""
    source = case.around.step.source
    found = None if source is None else acceptance_in(source.file)
    name, at = found or ("the probability to accept it", source)
    return {"name": f"`{name}`", "place": "" if at is None else at.place}
