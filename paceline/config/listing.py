"""The names and summaries of all members, read from their source texts: nothing is imported, so torch is not loaded.

A file that does more than define things, that imports what is not there, or whose classes could be refused when they
are made, is not judged by its text: then the whole family is imported by `discovery`, which knows what is wrong.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from paceline.config import registered

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("schemes", "tasks", "rules", "compressors", "hooks", "launchers", "compute", "data")
SCHEME_FAMILIES = (
    "synchronous",
    "asynchronous",
    "bounded or corrected staleness",
    "optimal time",
    "local updates",
    "elastic averaging",
    "groups and hierarchies",
    "decentralised",
    "others",
)  # in the order of `paceline list schemes` and docs/schemes.md; a scheme that names none is among the last
CONTRACTS = {
    "schemes": "paceline.scheme",
    "hooks": "paceline.hook",
    "launchers": "paceline.launcher",
    "compressors": "paceline.compressor",
}
BASES = {
    "rules": (("rules/rule.py", "rules/elementwise.py", "rules/torch_rules.py"), "Rule"),
    "compute": (("compute_times.py",), "ComputeTime"),
}  # the files, those of base classes first, and the base of all
PLAIN = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
# what a scheme refuses when its class is made: an async method of the server, `x += await …`, keyword-only arguments
REFUSED = re.compile(r"@[^\n]+\n\s+async def|[-+*/%&|^@]=\s*await\b|@on_server[^\n]*\n\s+def [^:]*\*[,*]")


class Listed(NamedTuple):
    """A member as `paceline list` shows it."""

    name: str
    summary: str
    family: str = ""  # of a scheme: one of SCHEME_FAMILIES


class _Unclear(Exception):
    """The text alone does not tell."""


def listed(family: str, folders: tuple[Path, ...] = ()) -> list[Listed]:
    """The members of a family, by name. `folders`: further ones that belong to it."""
    try:
        if f"paceline.{family}" in registered.groups():
            raise _Unclear
        return sorted(_read(family, folders))
    except (_Unclear, SyntaxError, UnicodeDecodeError, OSError):
        from paceline.config import discovery

        return [
            Listed(one.name, one.summary, getattr(one.value, "family", "others") if family == "schemes" else "")
            for one in discovery.FAMILIES[family]().values()
        ]


def _read(family: str, folders: tuple[Path, ...]) -> Iterator[Listed]:
    if family in BASES:
        files, base = BASES[family]
        known = {base}
        for node in (node for file in files for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body):
            if isinstance(node, ast.ClassDef) and known & {ast.unparse(one) for one in node.bases}:
                known.add(node.name)
                if any(keyword.arg == "listed" for keyword in node.keywords):
                    continue
                dashed = re.sub(r"\B(?=[A-Z])", "-", node.name) if family == "compute" else node.name
                yield Listed(dashed.lower(), _summary(node))
        return
    for path, tree in _files((ROOT / ("datasets" if family == "data" else family), *folders)):
        if family in CONTRACTS:
            yield from _classes(family, path, tree)
            continue
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        if family == "tasks":
            made = [node for node in functions if node.returns is not None and ast.unparse(node.returns) == "Task"]
            yield from (Listed(node.name.replace("_", "-"), _summary(node)) for node in made)
        elif any(node.name == "load" for node in functions):
            yield Listed(path.stem.replace("_", "-"), _summary(tree))


def _files(folders: tuple[Path, ...]) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(path for folder in folders for path in folder.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if REFUSED.search(text):
            raise _Unclear
        tree = ast.parse(text)
        for node in tree.body[ast.get_docstring(tree) is not None :]:
            # a file may also call a private name of its own, such as `_Dumper.add_representer(…)`
            prepares = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            typed = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
            if not isinstance(node, PLAIN) and not typed and not (prepares and ast.unparse(node).startswith("_")):
                raise _Unclear
            if isinstance(node, ast.Import | ast.ImportFrom):
                _check_import(node)
        yield path, tree


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        path = ROOT.parent / name.replace(".", "/")
        own = path.is_dir() or path.with_suffix(".py").is_file()
        if not (own if name.startswith("paceline") else _installed(name.partition(".")[0])):
            raise _Unclear


@cache
def _installed(package: str) -> bool:
    return package in sys.stdlib_module_names or find_spec(package) is not None


def _classes(family: str, path: Path, tree: ast.Module) -> Iterator[Listed]:
    homes = (CONTRACTS[family], f"paceline.{family}.")  # of the base classes: the contract, and other members
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(homes)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inside = all(isinstance(part, (*PLAIN, ast.Expr)) for part in node.body)
            if not inside or not all(isinstance(base, ast.Name) and base.id in known for base in node.bases):
                raise _Unclear
            if node.bases:
                known.add(node.name)
                named = _assigned(node, "family") or "others" if family == "schemes" else ""
                yield Listed(_name(node) or path.stem.rstrip("_").replace("_", "-"), _summary(node), named)


def _name(node: ast.ClassDef) -> str | None:
    """The name that a class is given, as `class X(Base, name="x")` or `name = "x"`."""
    values = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
    return str(ast.literal_eval(values[0])) if values else _assigned(node, "name")


def _assigned(node: ast.ClassDef, name: str) -> str | None:
    """The text that the body of a class assigns to a name."""
    assigned = [part for part in node.body if isinstance(part, ast.Assign)]
    values = [part.value for part in assigned if ast.unparse(part.targets[0]) == name]
    return str(ast.literal_eval(values[0])) if values else None


def _summary(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise _Unclear
    return text.partition("\n")[0]
