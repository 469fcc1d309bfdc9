"""Which frame of one trace is which of another."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard.trace.align import _fewest_edits, align
from fxguard.types import Frame, Row, Source


def op(name: str, kind: str, value: float = 1.0, code: str = "") -> Frame:
    source = Source("model.py", 1, code) if code else None
    return Frame(name, kind, True, (Row("output", 0.0, value),), source)


def module(name: str, kind: str) -> Frame:
    return Frame(name, kind, False, (Row("output", 0.0, 1.0),))


def same_numbers(x: Frame, y: Frame) -> bool:
    return x.rows == y.rows


def aligned(a: list[Frame], b: list[Frame]) -> list[tuple[int, int]]:
    pairs = align(a, b, same_numbers)
    for side in zip(*pairs, strict=True):
        assert list(side) == sorted(set(side))  # in order, and each once
    return pairs


def block(number: int) -> list[Frame]:
    name = f"layers.{number}"
    return [
        op(f"{name}.norm", "pow"),
        op(f"{name}.norm", "mean"),
        module(f"{name}.norm", "RMSNorm"),
        op(f"{name}.mlp", "linear"),
        op(f"{name}.mlp", "mul"),
        module(f"{name}.mlp", "MLP"),
        op(name, "add"),
        module(name, "Block"),
    ]


MODEL = [frame for number in range(4) for frame in block(number)]


def test_the_same_frames() -> None:
    assert aligned(MODEL, MODEL) == [(i, i) for i in range(len(MODEL))]
    assert aligned([], MODEL) == []


names = st.integers(0, 40).map(lambda n: op(f"layers.{n}", "mul"))


@settings(max_examples=200, database=None, deadline=None)
@given(st.lists(names, unique_by=lambda frame: frame.name), st.randoms(use_true_random=False))
def test_removed_frames(frames: list[Frame], chance: random.Random) -> None:
    """Whatever is taken out, the rest is found again."""
    kept = [i for i in range(len(frames)) if chance.random() < 0.7]
    assert aligned(frames, [frames[i] for i in kept]) == [(i, n) for n, i in enumerate(kept)]


@settings(max_examples=200, database=None, deadline=None)
@given(st.lists(names), st.lists(names))
def test_any_frames(a: list[Frame], b: list[Frame]) -> None:
    """Pairs rise in both, and where all names differ from each other none is missed."""
    pairs = aligned(a, b)
    assert all(a[i].kind == b[j].kind for i, j in pairs)
    if len({f.name for f in a}) == len(a) and len({f.name for f in b}) == len(b):
        same = [(i, j) for i, j in pairs if a[i].name == b[j].name]
        assert len(same) == longest_common([f.name for f in a], [f.name for f in b])


def longest_common(a: list[str], b: list[str]) -> int:
    """The textbook's table."""
    row = [0] * (len(b) + 1)
    for x in a:
        row = row[:]
        before = 0
        for j, y in enumerate(b):
            here = row[j + 1]
            row[j + 1] = before + 1 if x == y else max(row[j + 1], row[j])
            before = here
    return row[-1]


@settings(max_examples=300, database=None, deadline=None)
@given(st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_fewest_edits(a: str, b: str) -> None:
    """As many pairs as the textbook's table has, each of equal keys, rising in both."""
    pairs = _fewest_edits(a, b)
    assert pairs is not None
    assert len(pairs) == longest_common([*a], [*b])
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))


def test_loops() -> None:
    """The same names thousands of times, with steps left out."""
    a = [op("cell", kind) for _ in range(3000) for kind in ("linear", "tanh", "mul")]
    b = [frame for i, frame in enumerate(a) if i % 500]
    assert len(aligned(a, b)) == len(b)


def test_an_inserted_operation() -> None:
    casted = [*MODEL[:3], op("layers.0.mlp", "to"), *MODEL[3:]]
    assert aligned(MODEL, casted) == [(i, i + (i >= 3)) for i in range(len(MODEL))]


def test_a_renamed_operation() -> None:
    """The same line of the same module, or the same numbers."""
    a = [op("mlp", "linear"), op("mlp", "gelu", 2.0, "self.act(x)"), module("mlp", "MLP")]
    by_code = [op("mlp", "linear"), op("mlp", "gelu_new", 9.0, "self.act(x)"), module("mlp", "MLP")]
    by_number = [op("mlp", "linear"), op("mlp", "gelu_new", 2.0), module("mlp", "MLP")]
    neither = [op("mlp", "linear"), op("mlp", "gelu_new", 9.0), module("mlp", "MLP")]
    assert aligned(a, by_code) == [(0, 0), (1, 1), (2, 2)]
    assert aligned(a, by_number) == [(0, 0), (1, 1), (2, 2)]
    assert aligned(a, neither) == [(0, 0), (2, 2)]


def test_a_fused_operation() -> None:
    """It is the last of those that it stands for: what that one made is what it makes."""
    a = [op("mlp", "linear", 5.0), op("mlp", "gelu", 3.0), module("mlp", "MLP")]
    b = [op("mlp", "linear_gelu", 3.0), module("mlp", "MLP")]
    assert aligned(a, b) == [(1, 0), (2, 1)]
    assert aligned(b, a) == [(0, 1), (1, 2)]


def test_a_renamed_module() -> None:
    b = [Frame(f.name.replace("layers.2", "blocks.2"), f.kind, f.is_op, f.rows) for f in MODEL]
    assert aligned(MODEL, b) == [(i, i) for i in range(len(MODEL))]


def test_a_wrapper() -> None:
    """One that adds a first name to all modules, and one that adds it to some."""
    root = [*MODEL, module("", "Model")]
    ddp = [Frame(f"module.{f.name}".rstrip("."), f.kind, f.is_op, f.rows) for f in root]
    head = [*ddp, op("head", "linear"), module("", "WithHead")]
    for wrapped in (ddp, head):
        assert aligned(root, wrapped) == [(i, i) for i in range(len(root))]
        assert aligned(wrapped, root) == [(i, i) for i in range(len(root))]


def test_a_module_and_a_function() -> None:
    """``nn.GELU`` in one, ``functional.gelu`` in the other, with the same numbers."""
    a = [op("mlp", "linear"), module("mlp.act", "GELU"), op("mlp", "mul")]
    b = [op("mlp", "linear"), op("mlp", "gelu"), op("mlp", "mul")]
    assert aligned(a, b) == [(0, 0), (1, 1), (2, 2)]


def test_models_that_share_nothing() -> None:
    a = [op(f"a.{i}", f"left{i}", i) for i in range(300)]
    b = [op(f"b.{i}", f"right{i}", -i - 1) for i in range(400)]
    assert aligned(a, b) == []
    assert aligned(a * 3, b * 3) == []
