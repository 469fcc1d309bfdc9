"""Divisors that are entries of a table, as of a schedule of noise, and the name of that table.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.named import operand_text, operand_texts

__all__ = ["is_entry_of_table", "words_of_table"]

_ENTRIES = ("getitem", "index_select", "gather")
_ENTRY = re.compile(r"([\w.]+)\[(?![:, ]*None[:, ]*\])[^\]]+\]")  # ``self.signal[t]``


def is_entry_of_table(case: Case) -> bool:
    """Its divisor is an entry of what was computed before and has no gradient: of a schedule.

    Or it is the root of one, ``alphas[t].sqrt()``.
    """
    around, culprit = case.around, case.around.culprit
    entry = _entry_behind(case)
    if culprit is None or entry is None or around.is_differentiated(culprit):
        return False
    return bool(_table_in(case, entry)) and around.maker_of(entry.inputs[0]) is not None


def words_of_table(case: Case) -> Mapping[str, str]:
    """The name of that table, ``self.signal`` of ``self.signal[t]``, and where it was made."""
    entry, source = _entry_behind(case), case.around.step.source
    if entry is None:
        return {"table": "the table", "place": ""}
    made = case.around.maker_of(entry.inputs[0])
    place = "" if made is None or made.source is None else made.source.place
    is_here = source is not None and place == source.place
    return {
        "table": _table_in(case, entry),
        "place": f" ({place})" if place and not is_here else "",
    }


def _entry_behind(case: Case) -> Step | None:
    """What takes the divisor, or the number of which it is the root, out of a table."""
    culprit, maker_of = case.around.culprit, case.around.maker_of
    step = None if culprit is None else maker_of(culprit)
    if step is not None and plain(step.kind) == "sqrt" and step.inputs:
        step = maker_of(step.inputs[0])
    is_entry = step is not None and plain(step.kind) in _ENTRIES and bool(step.inputs)
    return step if is_entry else None


def _table_in(case: Case, entry: Step) -> str:
    """The name of the table, by what divides, or by what takes the entry; "" if there is none."""
    texts = [case.bare, case.bare.removesuffix(".sqrt()"), operand_text(case.bare, "sqrt")]
    root = case.around.maker_of(case.around.culprit or 0)
    if root is not None and plain(root.kind) == "sqrt" and root.source is not None:
        roots = operand_texts(root.source.code, "sqrt")
        entries = [each for each in roots if _ENTRY.fullmatch(each)]
        texts += entries if len(entries) == 1 else []
    matches = (_ENTRY.fullmatch(each) for each in texts)
    found = next((each[1] for each in matches if each is not None), "")
    code = "" if entry.source is None else entry.source.code.partition(" = ")[2]
    names = {each[1] for each in _ENTRY.finditer(code)}
    return found or (names.pop() if len(names) == 1 else "")
