"""Every relative link of README, docs, changelog and the others leads to a file, and its anchor to a heading there."""

from __future__ import annotations

import re

import pytest
from beds.pages import FENCE, ROOT, pages

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: str) -> set[str]:
    """The anchors of the headings of a page, as forges and the site make them."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken(page: str, text: str) -> list[str]:
    """The links that lead nowhere."""
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        if ":" in target:
            continue
        if not path.exists() or (anchor and anchor not in anchors(str(path.resolve().relative_to(ROOT)))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages())
def test_its_links_lead_somewhere(page: str) -> None:
    assert broken(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_broken_link_would_be_found() -> None:
    text = "[a](exact.md) [b](exact.md#limits-that-are-not-there) [c](../no-such.py) [d](no-such.md) [e](#glossary)"
    assert broken("docs/glossary.md", text) == ["exact.md#limits-that-are-not-there", "../no-such.py", "no-such.md"]
