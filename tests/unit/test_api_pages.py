"""The API pages of the docs have every public name, and every public name says in a docstring what it is."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import paceline

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in ("api.md", "api-extending.md"))
SHOWN = re.findall(r"^::: ([\w.]+)$", PAGES, flags=re.MULTILINE)


def test_every_public_name_is_on_a_page_once() -> None:
    assert len(SHOWN) == len(set(SHOWN))
    assert {f"paceline.{name}" for name in paceline.__all__} <= set(SHOWN)


# a vector is torch's class; what it is here stands beneath it in paceline/state.py
@pytest.mark.parametrize("name", [name for name in SHOWN if name != "paceline.Vector"])
def test_it_and_its_methods_have_docstrings(name: str) -> None:
    value = pkgutil.resolve_name(name)
    assert value.__doc__
    if inspect.isclass(value):
        assert not value.__doc__.startswith(f"{value.__name__}("), "this is what dataclasses write if there is none"
        methods = inspect.getmembers(value, lambda member: inspect.isroutine(member) or isinstance(member, property))
        public = {key: member for key, member in methods if not key.startswith("_")}
        assert [key for key, member in public.items() if not inspect.getdoc(member)] == []
