"""Formulas of the pages: TeX between dollars, which forges draw, becomes MathML, which browsers draw by themselves.

The site loads nothing from another host, and so no script that would draw TeX.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

import latex2mathml.converter
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

FORMULA = r"\$\$(.+?)\$\$|\$(?!\s)([^$]+?)(?<!\s)\$"  # on a line of its own, and within a paragraph
BESIDE_CODE = 185  # after code (190), before anything reads a backslash or an underscore (180 and less)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(Formulas())  # type: ignore[arg-type]
    return config


def mathml(tex: str, display: str) -> str:
    """A formula as MathML; what the converter does not know fails the build."""
    try:
        made = latex2mathml.converter.convert(tex.strip(), display=display)
        unknown = [part.text for part in ElementTree.fromstring(made).iter() if (part.text or "").startswith("\\")]
    except Exception as error:
        raise PluginError(f"the formula ${tex}$ cannot be converted: {error!r}") from error
    if unknown:
        raise PluginError(f"the formula ${tex}$ has a command that cannot be converted: {', '.join(unknown)}")
    return made


class FormulaPattern(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802  a name of markdown
        made = mathml(m[1], "block") if m[1] else mathml(m[2], "inline")
        return self.md.htmlStash.store(made), m.start(0), m.end(0)


class Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  a name of markdown
        md.inlinePatterns.register(FormulaPattern(FORMULA, md), "formula", BESIDE_CODE)
