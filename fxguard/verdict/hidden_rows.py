"""Where the masks were made that hide a whole row, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fxguard.graph.mask_makers import Mask, MaskMade
from fxguard.records import Source
from fxguard.rerun.hiding_masks import HiddenBy
from fxguard.source.assigned import assignments_of, in_words, statement_node, target_of
from fxguard.source.call_site import variable_given
from fxguard.source.lines import source_of_caller
from fxguard.source.masks import masks_in

__all__ = ["masks_of_graph", "masks_of_text"]

MOST_MASKS = 2


def masks_of_graph(
    found: Sequence[Mask], by: HiddenBy | None, forward: Callable[..., Any] | None
) -> str:
    """``its mask `pad` comes from net.py:9: pad = tokens == 0``; "" if nothing is known.

    Args:
        found: the masks of the row.
        by: which of them hide it; None if that is not known.
        forward: of the model, which a script calls on the line that runs; None if there is none.
    """
    alone = () if by is None else by.alone
    return _joined(
        (_made(each.made, forward) for each in alone or found), by, is_apart=len(alone) < len(found)
    )


def masks_of_text(shown: Sequence[Source]) -> str:
    """The same of the variables that mask something on lines that the report shows.

    Args:
        shown: the lines, the last one first.
    """
    here = {source.position for source in shown}
    told = []
    for source in shown:
        statement = statement_node(source)
        for name in [] if statement is None else masks_in(statement):
            made = assignments_of(name, source)
            if made and made[0][1].position not in here:
                told.append(in_words(made))
    return _joined(told)


def _made(mask: MaskMade, forward: Callable[..., Any] | None) -> str:
    if mask.source is not None:
        name = target_of(mask.source)
        return f"`{name}` comes from {mask.source}" if name else f"is made in {mask.source}"
    if not mask.argument.isidentifier():
        return ""
    caller = source_of_caller()
    name = ""
    if caller is not None and forward is not None:
        name = variable_given(f"argument `{mask.argument}` of ", forward, caller)
    made = assignments_of(name, caller) if name and caller is not None else []
    return in_words(made) if made else f"`{mask.argument}` is an argument of the model"


def _joined(told: Iterable[str], by: HiddenBy | None = None, *, is_apart: bool = False) -> str:
    """The masks in words.

    Args:
        told: where each comes from.
        by: which of them hide the row.
        is_apart: whether there are masks that do not hide it by themselves.
    """
    found = list(dict.fromkeys(filter(None, told)))
    if not found:
        return ""
    if len(found) > MOST_MASKS:  # what is told of all is not true of some
        found, by = found[:MOST_MASKS], None
    row = (by and by.keys) or "the row"
    if len(found) == 1:
        mask, made = _parted(found[0])
        is_told = by is not None and bool(by.alone) and (is_apart or bool(by.keys))
        what = f", which {'alone ' if is_apart else ''}hides {row}," if is_told else ""
        return f"its mask{mask}{what} {made}"
    how = ""
    if by is not None:
        how = f", each of which hides {row}" if by.alone else f", which hide {row} only together"
    return f"its masks{how}: {', and '.join(found)}"


def _parted(told: str) -> tuple[str, str]:
    """`` `pad` `` and ``comes from …``."""
    name, _, made = told.partition("` ") if told.startswith("`") else ("", "", told)
    return (f" {name}`", made) if name else ("", made)
