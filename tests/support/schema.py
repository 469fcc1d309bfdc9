"""The schema of all records, and what it says against one of them."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxguard.report import strict_json
from support.needs import needs

__all__ = ["FILE", "SCHEMA", "told"]

jsonschema = needs("jsonschema")

FILE = Path(strict_json.__file__).with_name("schema.json")
SCHEMA: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def objects_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a schema that lists properties."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for part in schema.values():
            yield from objects_of(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects_of(part)


@functools.cache
def strict(name: str = "") -> Any:
    """A validator for a definition, or for all of them, that takes no field that is not listed."""
    schema = copy.deepcopy(SCHEMA)
    for part in objects_of(schema):
        part["additionalProperties"] = False
    if name:
        del schema["oneOf"]
        schema["$ref"] = f"#/$defs/{name}"
    return jsonschema.Draft202012Validator(schema)


def told(name: str, record: Any) -> list[str]:
    """What a definition says against a record."""
    return [f"{error.json_path}: {error.message}" for error in strict(name).iter_errors(record)]
