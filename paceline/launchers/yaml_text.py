"""Plain data written as YAML, for people to read: mappings, sequences, text, numbers and truth values."""

from __future__ import annotations

import json
import re
from typing import Any

# text that YAML reads as itself; what it might take for a number, a truth value or a date is quoted
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./=,-]*(:[A-Za-z0-9_./=,-]+)*")
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def written(value: Any) -> str:
    """A document, without the line that parts it from the one before."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, part in value.items() for line in _entry(f"{_scalar(str(key))}:", part)]
    if isinstance(value, list) and value:
        return [line for part in value for line in _item(part)]
    return [_scalar(value)]


def _entry(key: str, part: Any) -> list[str]:
    if isinstance(part, dict | list) and part:
        return [key, *(f"  {line}" for line in _lines(part))]
    return [f"{key} {_scalar(part)}"]


def _item(part: Any) -> list[str]:
    first, *rest = _lines(part)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
