"""Turns what was kept for a backward into graph runs, in the order of the forward."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from fxguard.batch.kept_run import Kept, KeptRun, KeptTape, versions_of
from fxguard.batch.tape_graph import Made
from fxguard.forgiving import where_theirs_may_raise

__all__ = ["runs_of"]


def runs_of(kept: Iterable[Kept]) -> Iterator[KeptRun]:
    """What is kept, as runs in the order of the forward, without those that cannot run again.

    Tensors that one tape made at the same time form one run. A later run of that tape is cut where
    an earlier run ends, because the gradients there belong to the earlier run.
    """
    ended: dict[int, set[int]] = {}  # id of a tape to the tensors where earlier runs end
    in_order = sorted(kept, key=_when)
    for _, group in itertools.groupby(in_order, _when):
        together = list(group)
        tapes: dict[int, list[KeptTape]] = {}
        for each in together:
            if isinstance(each, KeptTape):
                if each.root.number not in ended.setdefault(id(each.tape), set()):
                    tapes.setdefault(id(each.tape), []).append(each)
            elif isinstance(each, KeptRun):
                yield each
        for key, parts in tapes.items():
            with where_theirs_may_raise():  # operations that cannot run again
                yield _as_run(parts, ended[key])
            ended[key].update(part.root.number for part in parts)


def _when(kept: Kept) -> tuple[int, int]:
    return kept.batch_number, kept.index


def _as_run(parts: Sequence[KeptTape], ended: Collection[int]) -> KeptRun:
    """Parts of one tape as a graph run."""
    tape, roots = parts[0].tape, list(dict.fromkeys(part.root for part in parts))
    event, restore_settings = tape.run(roots, ended)
    assert event.args is not None
    return KeptRun(
        event=event,
        batch_number=parts[0].batch_number,
        index=parts[0].index,
        args=event.args,
        random_state=event.random_state,
        versions=versions_of(event.args),
        restore_settings=restore_settings,
        incoming={roots.index(part.root): part.incoming[0] for part in parts},
        returned=[i for i, root in enumerate(roots) if _is_returned(root, parts)],
        of_tape=True,
    )


def _is_returned(root: Made, parts: Sequence[KeptTape]) -> bool:
    """Whether a model returned a tensor, and no graph reads it."""
    return all(part.is_returned for part in parts if part.root == root)
