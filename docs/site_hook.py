"""What mkdocs is told about the files beside docs/: links to them work in the site as they do on a forge.

A page outside docs/ that is linked to (README.md, CHANGELOG.md, …) is a page of the site too, another text (a source
file) is shown on a page, and an image is copied. Only what is linked to is in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")  # text, file, anchor
NAMES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
IMAGES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Entries of the navigation that end with / become the pages of that folder."""
    assert config.nav is not None
    config.nav = [entry for entry in map(expanded, config.nav) if entry]
    return config


def expanded(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, content),) = entry.items()
    if isinstance(content, str) and content.endswith("/"):
        folder = ROOT / "docs" / content
        pages = sorted(folder.glob("*.md"), key=lambda path: (path.name != "README.md", path.name))
        content = [content + path.name for path in pages]
    elif isinstance(content, list):
        content = [part for part in map(expanded, content) if part]
    return {title: content} if content else None


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages link to, and those that these link to."""
    known = {f"docs/{file.src_uri}" for file in files}
    todo = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(known)]
    while todo:
        path = todo.pop()
        if path not in known:
            known.add(path)
            files.append(outside(path, config))
        if path.endswith(".md"):
            todo += sorted(targets(path) - known)
    return files


def outside(path: str, config: MkDocsConfig) -> File:
    if Path(path).suffix in IMAGES:
        return File.generated(config, site_uri(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    if path == "README.md":
        text = f"---\nhide: [navigation]\n---\n{text}"
    elif not path.endswith(".md"):
        language = LANGUAGES.get(Path(path).suffix, "")
        text = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}````\n"
    return File.generated(config, site_uri(path), content=text)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    path = repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        target = resolved(path, link)
        if target is None:
            return match[0]
        if text == link and target.endswith(".md"):  # a forge shows the file, the site its title
            text = title(target)
        return f"[{text}]({posixpath.relpath(site_uri(target), folder or '.')}{anchor})"

    return LINK.sub(replaced, markdown)


def title(path: str) -> str:
    """The first heading of a page."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), path)


def targets(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    found = (resolved(path, match[2]) for match in LINK.finditer((ROOT / path).read_text(encoding="utf-8")))
    return {target for target in found if target is not None}


def resolved(path: str, link: str) -> str | None:
    """The file of the repository that a link of a page leads to; None if it leads elsewhere."""
    if ":" in link:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target += "/README.md"
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def site_uri(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return NAMES.get(path, path)
    return path if Path(path).suffix in IMAGES else f"{path}.md"


def repository_path(uri: str) -> str:
    """The file that a page of the site was made from."""
    outside_names = {name: path for path, name in NAMES.items()}
    if uri in outside_names:
        return outside_names[uri]
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri
