"""The listing of a scheme: its docstring and its source, read as text. Nothing is imported, so torch is not loaded."""

from __future__ import annotations

import ast
import threading
from importlib.util import find_spec
from pathlib import Path

from paceline.config.listing import ROOT

# Python 3.11 counts the depth of `ast.parse` for all threads together: two at once may raise a SystemError. Reentrant:
# the garbage collector may run code inside
_ONE_AT_A_TIME = threading.RLock()


def listing_of(name: str | None) -> dict[str, str]:
    """What a scheme is, what its class says, and where it is; empty texts if it cannot be found by its name."""
    found = {"name": name or "", "doc": "", "source": "", "file": ""}
    if not name:
        return found
    try:
        path, wanted = _place(name)
        text = path.read_text(encoding="utf-8")
        classes = [node for node in _parsed(text).body if isinstance(node, ast.ClassDef)]
        named = [node for node in classes if wanted in (node.name, _given_name(node))]
        # a scheme without a name of its own has that of its file
        plain = [node for node in classes if not node.name.startswith("_") and node.bases and not _given_name(node)]
        for node in (named or plain)[:1]:
            source = ast.get_source_segment(text, node) or ""
            decorators = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list)
            return found | {"doc": ast.get_docstring(node) or "", "source": decorators + source, "file": path.name}
        return found | {"source": text, "file": path.name}
    except (OSError, SyntaxError, ValueError, ImportError, LookupError):
        return found


def _place(name: str) -> tuple[Path, str]:
    """The file of a scheme, and the name of its class or the scheme's own."""
    where, _, class_name = name.rpartition(":")
    if where.endswith(".py"):
        return Path(where), class_name
    if where:
        spec = find_spec(where) if "." not in where else None  # that of a module in a package would import the package
        if spec is None or spec.origin is None:
            raise LookupError(name)
        return Path(spec.origin), class_name
    for path in sorted(ROOT.joinpath("schemes").glob("[!_]*.py")):
        if path.stem.rstrip("_").replace("_", "-") == name:
            return path, name
    for path in sorted(ROOT.joinpath("schemes").glob("[!_]*.py")):
        nodes = _parsed(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.ClassDef) and _given_name(node) == name for node in nodes):
            return path, name
    raise LookupError(name)


def _given_name(node: ast.ClassDef) -> str:
    values = [one.value for one in node.keywords if one.arg == "name"]
    assigned = [one for one in node.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "name"]
    values += [one.value for one in assigned]
    return str(values[0].value) if values and isinstance(values[0], ast.Constant) else ""


def _parsed(text: str) -> ast.Module:
    with _ONE_AT_A_TIME:
        return ast.parse(text)
