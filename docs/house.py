"""The house, read from its source: the packages, what imports what, and the map of them.

    ./dev map

writes the map in CONTRIBUTING.md from the docstrings of the packages and of their files, and says
how many imports cross from package to package, and how many of them are wrong.
tests/repository/test_layout.py holds the code against the same rules. Nothing is imported here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fxguard"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- map: ./dev map writes it -->\n", "<!-- end of the map -->\n"

# From left to right, as a graph goes: a room may import only those to its left. Rooms that share a
# place are edges of the house, and know nothing of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    *(
        (name,)
        for name in ("given_out", "errors", "forgiving", "records", "findings", "formats", "globs")
    ),
    *((name,) for name in ("torch_names", "trees")),  # what is private to torch
    *((name,) for name in ("measure", "report", "ranks", "source", "graph", "trace")),
    *((name,) for name in ("plan", "options", "passes", "batch", "rerun", "capture")),
    *((name,) for name in ("advice", "verdict", "install", "steps", "guard", "script")),
    *((name,) for name in ("in_dtype", "budget", "recording")),  # what several tools stand on
    # Tools, side by side.
    (
        "comparison",
        "dependence",
        "forecasting",
        "history",
        "matching",
        "patch",
        "quiet",
        "reproduce",
        "tracing",
        "underflow",
        "why",
    ),
    ("api",),
    ("debug_utils", "netcheck", "types"),  # names that documents give
    ("__init__",),  # gives out the names of those to its left
    ("integrations", "testing", "cli", "about"),
    ("__main__",),
)
PLACE = {room: place for place, layer in enumerate(LAYERS) for room in layer}


@dataclass(frozen=True)
class Import:
    """One import of a file of this package by another one."""

    file: str  # "plan/reader.py"
    line: int
    importer: str  # "plan.reader"
    imported: str  # "graph.nodes", likewise; "__init__" for the package itself

    @property
    def rooms(self) -> tuple[str, str]:
        """Room of the importer, room of the imported."""
        return room_of(self.importer), room_of(self.imported)

    @property
    def is_wrong(self) -> bool:
        """Whether it goes to the right, or across to a room that shares the place."""
        mine, other = self.rooms
        return mine != other and PLACE[other] >= PLACE[mine]


def room_of(module: str) -> str:
    """The package, or the single file, in which a module stands."""
    return module.partition(".")[0]


def name_of(file: Path) -> str:
    """``plan.reader`` of fxguard/plan/reader.py."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imported_by(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports: in functions, for types, all of it.

    Raises:
        ValueError: for a relative import, which would say less.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno}: a relative import")
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_of(name: str, source: str | None = None) -> list[Import]:
    """What a file imports of this package."""
    text = FILES[name].read_text() if source is None else source
    found = []
    for line, dotted in imported_by(ast.parse(text)):
        top, _, rest = dotted.partition(".")
        if top != "fxguard":
            continue
        while rest and rest not in FILES:
            rest = rest.rpartition(".")[0]
        file = str(FILES[name].relative_to(PACKAGE))
        found.append(Import(file, line, name, rest or "__init__"))
    return found


def all_imports() -> list[Import]:
    """Every import inside the package."""
    return [each for name in FILES for each in imports_of(name)]


def circles() -> list[tuple[str, ...]]:
    """Files that import each other, directly or not; each group once."""
    graph: dict[str, set[str]] = {name: set() for name in FILES}
    for each in all_imports():
        graph[each.importer].add(each.imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph.get(todo.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    todo.append(name)
        return seen

    behind = {name: reached(name) for name in graph}
    groups = {
        tuple(sorted(other for other in behind[name] if name in behind[other]))
        for name in graph
        if name in behind[name]
    }
    return sorted(groups)


def summary(name: str) -> str:
    """The first sentence of a file's docstring."""
    said = ast.get_docstring(ast.parse(FILES[name].read_text())) or ""
    first = " ".join(said.partition("\n\n")[0].split())
    sentence, dot, _ = first.partition(". ")
    return (sentence + dot).strip()


def flows(room: str) -> tuple[str, str]:
    """What comes into a package and what goes out, as its docstring says."""
    said = ast.get_docstring(ast.parse(FILES[room].read_text())) or ""
    found = {}
    for paragraph in said.split("\n\n"):
        for word in ("In", "Out"):
            if paragraph.startswith(f"**{word}**: "):
                found[word] = " ".join(paragraph.removeprefix(f"**{word}**: ").split())
    return found.get("In", ""), found.get("Out", "")


def files_in(room: str) -> list[str]:
    """The files of a package, the public ones first."""
    inside = [name for name in FILES if name.startswith(f"{room}.")]
    return sorted(inside, key=lambda name: (name.rpartition(".")[2].startswith("_"), name))


def as_markdown() -> str:
    """The map."""
    lines = []
    for layer in LAYERS:
        for room in layer:
            inside = files_in(room)
            if not inside:
                if room not in ("__init__", "__main__"):
                    lines.append(f"- **`{room}.py`**: {summary(room)}")
                continue
            into, out = flows(room)
            lines += [f"- **`{room}/`**: {summary(room)}"]
            lines += [f"  In: {into}", f"  Out: {out}"] if into else []
            for name in inside:
                lines.append(f"  - `{name.partition('.')[2].replace('.', '/')}`: {summary(name)}")
    return "\n".join(lines) + "\n"


def with_map(text: str) -> str:
    """A text whose map is the present one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("CONTRIBUTING.md has no place for the map")
    return f"{before}{BEGIN}{as_markdown()}{END}{after}"


def main() -> int:
    """Write the map; the exit status says whether all imports are right."""
    CONTRIBUTING.write_text(with_map(CONTRIBUTING.read_text()))
    crossing = {each.rooms for each in all_imports() if each.rooms[0] != each.rooms[1]}
    wrong = [each for each in all_imports() if each.is_wrong]
    for each in wrong:
        print(f"{each.file}:{each.line}: {each.importer} imports {each.imported}")
    for group in circles():
        print(f"circle: {', '.join(group)}")
    rooms = sum(len(layer) for layer in LAYERS)
    print(
        f"{rooms} rooms, {len(FILES)} files, {len(crossing)} edges from room to room, "
        f"{len(wrong)} to the right, {len(circles())} circles"
    )
    return int(bool(wrong or circles()))


if __name__ == "__main__":
    sys.exit(main())
