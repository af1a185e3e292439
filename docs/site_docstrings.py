"""How docstrings are shown in the API reference of the site.

Lines `name: what it is` are a list there, the comment at the end of a field's line is the field's docstring, and
`docs/page.md` is a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"(`?[a-z_][\w.]*`?(?:, `?[a-z_]\w*`?)*):\s+(?=\S)")
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md")


class SiteDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if isinstance(obj, griffe.Attribute) and not obj.docstring and isinstance(obj.parent, griffe.Class):
            comment = comment_of(obj)
            obj.docstring = griffe.Docstring(comment, parent=obj) if comment else None
        if obj.docstring:
            text = "\n\n".join(map(listed, obj.docstring.value.split("\n\n")))
            obj.docstring.value = PAGE.sub(r"[\1](\1.md)", text)


def comment_of(attribute: griffe.Attribute) -> str:
    """The comment at the end of the first line of a field, as a sentence."""
    if attribute.lineno is None:
        return ""
    line = attribute.lines_collection[attribute.filepath][attribute.lineno - 1]
    comment = line.partition("  # ")[2].strip()
    if not comment or comment.startswith(("type:", "noqa")):
        return ""
    return comment[0].upper() + comment[1:].rstrip(".") + "."


def listed(paragraph: str) -> str:
    """A paragraph of lines `name: what it is` as a list in Markdown; another paragraph as it is."""
    lines = paragraph.splitlines()
    if len(lines) < 2 or not NAMED.match(lines[0]) or not any(map(NAMED.match, lines[1:])):
        return paragraph
    entries = (NAMED.sub(lambda match: "- `" + match[1].replace("`", "") + "`: ", line, count=1) for line in lines)
    return "\n".join(
        entry if entry.startswith("- ") else f"    {line.strip()}" for entry, line in zip(entries, lines, strict=True)
    )
