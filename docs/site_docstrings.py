"""How the reference of the site reads docstrings: an extension of griffe, for mkdocstrings.

Roles (``:func:`instrument```) become links, ``Example:`` becomes a section, and the comments of a
record's fields become the list of its attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?([^`]+)`")
EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)


def is_record(of: griffe.Class) -> bool:
    """Whether a class is a dataclass."""
    return any(str(decorator.value).startswith("dataclass") for decorator in of.decorators)


def fields_of(of: griffe.Class) -> Iterator[str]:
    """The fields of a record, a line each, as the section ``Attributes`` has them."""
    lines = Path(str(of.filepath)).read_text(encoding="utf-8").splitlines()
    for name, field in of.attributes.items():
        first, last = field.lineno, field.endlineno
        is_field = field.annotation and "property" not in field.labels and name[0] != "_"
        if is_field and first and last:
            yield f"    {name}: {comment_of(lines, first, last)}"


def comment_of(lines: list[str], first: int, last: int) -> str:
    """The comment behind a field, or the lines of comment above it.

    Args:
        lines: of the file.
        first: line of the field, counted from 1.
        last: its last line.
    """
    behind = lines[last - 1].partition("  # ")[2]
    if behind:
        return behind
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    return " ".join(above)


class Docstrings(griffe.Extension):
    """Docstrings as they are written here.

    Args:
        names: the names that have an entry in the reference, in full.
    """

    def __init__(self, names: list[str]) -> None:
        self.public = {name.rpartition(".")[2]: name for name in names}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is None:
            return
        text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
        if isinstance(obj, griffe.Class) and is_record(obj) and "Attributes:" not in text:
            fields = list(fields_of(obj))
            text += "\n\nAttributes:\n" + "\n".join(fields) if fields else ""
        obj.docstring.value = ROLE.sub(self.linked, text)

    def linked(self, role: re.Match[str]) -> str:
        """A role as a link to the entry of its name, or of its class; as code without one."""
        words = role[1].split(".")
        for i, word in enumerate(words):
            if word in self.public:
                text = ".".join(words[i:]) if i + 1 < len(words) else role[1]
                return f"[`{text}`][{self.public[word]}]"
        return f"`{role[1]}`"
