"""Rows of a softmax that a filter has hidden whole: a mask made of the scores themselves.

As of a nucleus, or a threshold that no score of a row reaches. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.records import Source
from fxguard.source.assigned import target_of
from fxguard.source.masks_of_scores import mask_of_scores
from fxguard.source.named import argument_text

__all__ = ["filter_of", "words_of_filter", "words_of_masked"]

_FILLS = frozenset(["masked_fill", "setitem", "where"])


def filter_of(case: Case) -> Source | None:
    """The line that compares something made of the scores; None where another mask hides them.

    Of several filters it is that of the last one: had one before it hidden a row, the scores of
    that row were NaN, which no comparison hides.
    """
    masks = [mask_of_scores(each) for each in _fills(case)]
    return masks[0] if masks and None not in masks else None


def _fills(case: Case) -> list[Source]:
    """The lines that mask them, the last one first."""
    inputs = case.around.step.inputs
    behind = case.around.behind(inputs[0]) if inputs else []
    found = {
        each.source.position: each.source
        for each in behind
        if plain(each.kind).rstrip("_") in _FILLS and each.source is not None
    }
    return list(found.values())


def _filled(case: Case) -> Source | None:
    """The only line that masks them; None if there are none, or several."""
    fills = _fills(case)
    return fills[0] if len(fills) == 1 else None


def words_of_filter(case: Case) -> Mapping[str, str]:
    """``{"mask": "`remove` (gen.py:41: remove = cum > top_p)"}``."""
    source = filter_of(case)
    if source is None:
        return {"mask": "it"}
    filled, name = _fills(case)[0], target_of(source)
    is_named = bool(name) and filled.position != source.position
    return {"mask": f"`{name}` ({source})" if is_named else f"the mask ({source.place})"}


def words_of_masked(case: Case) -> Mapping[str, str]:
    """``{"filled": "masked_fill (gen.py:40)", "mask": "pad"}``; {} if the lines do not tell."""
    filled = _filled(case)
    if filled is None:
        return {}
    hidden, kept = (argument_text(filled.code, *of) for of in (("masked_fill", 1), ("where", 0)))
    if hidden:
        return {"filled": f"masked_fill ({filled.place})", "mask": hidden}
    is_name = kept.replace(".", "_").isidentifier()
    mask = f"~{kept}" if is_name else f"~({kept})"
    return {"filled": f"where ({filled.place})", "mask": mask} if kept else {}
