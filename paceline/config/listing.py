"""The names and summaries of all members, read from their source texts: nothing is imported, so torch is not loaded.

A file that does more than define things, that imports what is not there, or whose classes could be refused when they
are made, is not judged by its text: then the whole family is imported by `discovery`, which knows what is wrong.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLAIN = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
# what a scheme refuses when its class is made: an async method of the server, `x += await …`, keyword-only arguments
REFUSED = re.compile(r"@[^\n]+\n\s+async def|[-+*/%&|^@]=\s*await\b|@on_server[^\n]*\n\s+def [^:]*\*[,*]")
CONTRACTS = {"schemes": "paceline.scheme", "hooks": "paceline.hook", "launchers": "paceline.launcher"}


class Listed(NamedTuple):
    """A member as `paceline list` shows it."""

    name: str
    summary: str


class _Unclear(Exception):
    """The text alone does not tell."""


def listed(family: str, folders: tuple[Path, ...] = ()) -> list[Listed]:
    """The members of a family, by name. `folders`: further ones that belong to it."""
    try:
        if f"paceline.{family}" in _groups():
            raise _Unclear
        return sorted(_READERS[family]((ROOT / family, *folders)))
    except (_Unclear, SyntaxError, UnicodeDecodeError, OSError):
        from paceline.config import discovery

        return [Listed(one.name, one.summary) for one in discovery.FAMILIES[family]().values()]


@cache
def _groups() -> frozenset[str]:
    """The groups in which other packages register members."""
    return frozenset(entry_points().groups)


def _files(folders: tuple[Path, ...]) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(path for folder in folders for path in folder.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if REFUSED.search(text):
            raise _Unclear
        tree = ast.parse(text)
        for node in tree.body[ast.get_docstring(tree) is not None :]:
            if not isinstance(node, PLAIN) and not _prepares_itself(node):
                raise _Unclear
            _check_imports(node)
        yield path, tree


def _prepares_itself(node: ast.stmt) -> bool:
    """Whether a line calls a private name of its file, such as `_Dumper.add_representer(…)`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value).startswith("_")


def _check_imports(node: ast.stmt) -> None:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    for name in names:
        if name.startswith("paceline"):
            path = ROOT.parent / name.replace(".", "/")
            if not path.is_dir() and not path.with_suffix(".py").is_file():
                raise _Unclear
        elif not _installed(name.partition(".")[0]):
            raise _Unclear


@cache
def _installed(package: str) -> bool:
    return package in sys.stdlib_module_names or find_spec(package) is not None


def _classes(family: str) -> Callable[[tuple[Path, ...]], Iterator[Listed]]:
    def read(folders: tuple[Path, ...]) -> Iterator[Listed]:
        for path, tree in _files(folders):
            known = _imported(tree, (CONTRACTS[family], f"paceline.{family}."))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    inside = all(isinstance(part, (*PLAIN, ast.Expr)) for part in node.body)
                    if not inside or not all(isinstance(base, ast.Name) and base.id in known for base in node.bases):
                        raise _Unclear
                    if node.bases:
                        known.add(node.name)
                        yield Listed(_name(node) or path.stem.rstrip("_").replace("_", "-"), _summary(node))

    return read


def _imported(tree: ast.Module, homes: tuple[str, ...]) -> set[str]:
    """The names that a file imports from the contract of its family or from another member."""
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(homes)
        for alias in node.names
    }


def _name(node: ast.ClassDef) -> str | None:
    """The name that a class is given, as `class X(Base, name="x")` or `name = "x"`."""
    values = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
    assigned = [part for part in node.body if isinstance(part, ast.Assign)]
    values += [part.value for part in assigned if ast.unparse(part.targets[0]) == "name"]
    return str(ast.literal_eval(values[0])) if values else None


def _summary(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise _Unclear
    return inspect.cleandoc(text).partition("\n")[0]


def _tasks(folders: tuple[Path, ...]) -> Iterator[Listed]:
    for _, tree in _files(folders):
        for node in tree.body:
            made = isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns)
            if isinstance(node, ast.FunctionDef) and made == "Task" and not node.name.startswith("_"):
                yield Listed(node.name.replace("_", "-"), _summary(node))


def _datasets(_: tuple[Path, ...]) -> Iterator[Listed]:
    for path, tree in _files((ROOT / "datasets",)):
        if any(isinstance(node, ast.FunctionDef) and node.name == "load" for node in tree.body):
            yield Listed(path.stem.replace("_", "-"), _summary(tree))


def _of_one_file(file: str, base: str, name: Callable[[str], str]) -> Callable[[tuple[Path, ...]], Iterator[Listed]]:
    """Subclasses of `base` in one file of this package."""

    def read(_: tuple[Path, ...]) -> Iterator[Listed]:
        known = {base}
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and known & {ast.unparse(one) for one in node.bases}:
                known.add(node.name)
                yield Listed(name(node.name), _summary(node))

    return read


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


_READERS: dict[str, Callable[[tuple[Path, ...]], Iterator[Listed]]] = {
    "schemes": _classes("schemes"),
    "tasks": _tasks,
    "rules": _of_one_file("rules.py", "Rule", str.lower),
    "hooks": _classes("hooks"),
    "launchers": _classes("launchers"),
    "compute": _of_one_file("compute_times.py", "ComputeTime", _dashed),
    "data": _datasets,
}
FAMILIES = tuple(_READERS)
