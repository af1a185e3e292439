"""The pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FRAGMENT = re.compile(r"<!-- fragment: (.+?) -->\n\n?\Z")
STARTERS = ("mpirun", "torchrun", "srun")  # run the command that follows their own options


@dataclass(frozen=True)
class Block:
    """A code block. `fragment`: why it is not to be run, from the comment before it, `<!-- fragment: reason -->`."""

    page: str
    line: int
    language: str
    text: str
    fragment: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README.md and all others, as paths in the repository."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
    return [str(path.relative_to(ROOT)) for path in [*found, *sorted((ROOT / "docs").rglob("*.md"))]]


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        fragment = FRAGMENT.search(before)
        yield Block(page, before.count("\n") + 1, found[1], found[2], fragment[1] if fragment else "")


def commands(block: Block) -> Iterator[list[str]]:
    """The `paceline` commands of a shell block, or of a listing of a terminal, as words without `paceline`."""
    if block.language not in ("", "sh"):
        return
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    prompts = [line.partition("$ ")[2] for line in lines if re.match(r"\w*\$ ", line)]
    for line in prompts or lines:
        if not re.match(rf"([A-Z_]+=|paceline |(?:{'|'.join(STARTERS)}) )", line) or "[" in line.partition("#")[0]:
            continue
        words = shlex.split(re.split(r"\s#|\s[|>&]", line)[0])
        if "paceline" in words:
            yield words[words.index("paceline") + 1 :]
