"""A page whose own scripts run, and no others: its policy names them by their hashes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence

__all__ = ["in_html", "one_script", "scripted_page"]


def scripted_page(template: str, scripts: Sequence[str], parts: Mapping[str, str]) -> str:
    """The text of a page.

    Args:
        template: HTML with placeholders such as ``<!--TITLE-->``; ``<!--POLICY-->`` is one.
        scripts: every script of the page.
        parts: what stands in the placeholders. `<` is escaped in all that is not our own.
    """
    hashes = " ".join(map(_hash, scripts))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"
    text = template
    for name, part in {"POLICY": policy, **parts}.items():
        text = text.replace(f"<!--{name}-->", part)
    return text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # half a surrogate pair


def one_script(files: Sequence[str]) -> str:
    """Several files as one script, which leaves no names to others."""
    return '(() => {\n"use strict";\n' + "\n".join(files) + "})();\n"


def in_html(text: str) -> str:
    """JSON that can stand in a script element: the three characters HTML looks for, as escapes."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
