"""Imports point one way: the layers of the package, from the contracts down to the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).resolve().parent

# A module imports from the layers above its own and from its own folder. `contracts` are the files at the top.
LAYERS = """
contracts
runs.atomic_files runs.event_file processes.parent_death processes.process_title
torch_task
inside framework_tasks
schemes hooks compressors datasets
tasks
config
runtime
simulator runs
processes.resource_limits processes.line_buffer processes.transport
processes.memory
processes.inside
processes.calls processes.means
processes.roles
processes.supervisor
network.secure
network.cluster network.calls network.means
transports collectives network.nodes launchers
report
api
keras
experiments
planning
cli testing
"""
# what people write themselves; event files are written by hooks too, and know nothing of a run
ONLY_CONTRACTS = ("schemes", "hooks", "compressors")

# a command handles signals before it loads anything; `list` loads torch only if a member's text does not tell enough.
# (The bodies of commands are loaded by name when a command is chosen: paceline/cli/commands.py.)
LATER = {("__main__", "cli.main"), ("config.listing", "config.discovery")}

# the only module that hands objects from a process to its own children
CARRIES = "processes.supervisor.pickled_objects"

# Without clocks and threads: time is the simulator's own there, or no matter.
TIMELESS = {
    "contracts",
    "schemes",
    "hooks",
    "compressors",
    "tasks",
    "config",
    "runtime",
    "simulator",
    "processes.transport",
}

FORBIDDEN_NAMES = {"utils", "util", "common", "base", "manager", "helpers", "misc", "core"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


MODULES = modules()
PACKAGES = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in ROOT.rglob("*/__init__.py")}
EMPTY = {"processes", "network"}  # folders of layers


def layer(module: str) -> tuple[int, str]:
    """The layer of a module, and its folder."""
    for number, line in enumerate(LAYERS.split("\n")):
        for folder in line.split():
            if module == folder or module.startswith(f"{folder}."):
                return number, folder
    # update rules are a contract with several files
    top = module.partition(".")[0] == "rules" or ("." not in module and module not in PACKAGES)
    assert top, f"paceline/{module} is in no layer: put its folder on the list"
    return 0, "contracts"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[str]:
    """All that a file imports from, anywhere in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules of paceline that a file imports, and whether at its top; what only the type checker sees is left out."""
    tree = parsed(path)
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            module = node.module or ""
            within = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("paceline.") in MODULES else module for name in within]
        for name in names:
            if name == "paceline" or name.startswith("paceline."):
                yield name.removeprefix("paceline."), id(node) in top


def wrong_imports(module: str) -> Iterator[str]:
    depth, folder = layer(module)
    for other, top in imported(MODULES[module]):
        if other == "paceline" or (module, other) in LATER:
            continue
        above, home = layer(other)
        if above >= depth and home != folder:
            yield f"{module} imports {other}, which is no layer above {folder}"
        if folder in ONLY_CONTRACTS and home not in ("contracts", "runs.event_file", folder):
            yield f"{module} imports {other}: {folder} know contracts only"
        if not top:
            yield f"{module} imports {other} inside a function: that hides a cycle"


def test_imports_point_one_way() -> None:
    assert [text for module in MODULES if module not in EMPTY for text in wrong_imports(module)] == []


def test_the_layers_have_no_dead_words() -> None:
    assert {layer(module)[1] for module in MODULES if module not in EMPTY} == set(LAYERS.split())


def test_the_top_of_the_package_is_its_contracts() -> None:
    assert len([path for path in ROOT.iterdir() if path.is_file()]) <= 22


def test_no_module_needs_itself() -> None:
    """Without what functions import later there is no circle: any module can be read alone."""
    needs = {module: {other for other, top in imported(path) if top} for module, path in MODULES.items()}
    done: set[str] = set()
    while len(done) < len(needs):
        ready = {module for module in needs.keys() - done if needs[module] - {"paceline", module} <= done}
        assert ready, f"a circle among {sorted(needs.keys() - done)}"
        done |= ready


def test_a_scheme_imports_little() -> None:
    """Torch, the standard library's plainest parts, and what a scheme is made of: it cannot know its world."""
    allowed = {"__future__", "collections", "dataclasses", "math", "typing", "torch", "itertools", "functools"}
    schemes = sorted((ROOT / "schemes").glob("*.py"))
    found = {f"{path.name} imports {name}" for path in schemes for name in imported_names(path)}
    assert schemes
    assert not {text for text in found if text.split()[-1].partition(".")[0] not in allowed | {"paceline"}}


def test_no_class_name_is_used_twice() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_files_are_named_after_what_they_hold() -> None:
    assert not [module for module in MODULES if set(module.split(".")) & FORBIDDEN_NAMES]


def unpickling(module: str) -> Iterator[str]:
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            roots = {name.partition(".")[0] for name in names}
            picklers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & roots
            if picklers and module != CARRIES:
                yield f"{module} imports {picklers}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"torch.load", "torch.save", "eval", "exec", "pickle.loads"}:
                yield f"{module} calls {called}"
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if keywords.get("allow_pickle", "False") != "False":
                yield f"{module} allows pickles"


def test_nothing_is_ever_unpickled() -> None:
    """Data are bytes with names: reading them must never run code."""
    assert [text for module in MODULES for text in unpickling(module)] == []


def test_no_clock_and_no_event_loop_in_the_core() -> None:
    """Time is the simulator's own where it is not real, and steps are driven without asyncio."""
    found = []
    for module, path in MODULES.items():
        forbidden = {"asyncio", "random"}
        if module in ("processes.roles.script_role", "torch_task.random_numbers"):  # they seed it for the user's code
            forbidden -= {"random"}
        if module not in EMPTY and layer(module)[1] in TIMELESS:
            forbidden |= {"time", "datetime", "threading"} - ({"threading"} if module == "signals" else set())
        found += [f"{module} imports {name}" for name in sorted(forbidden & set(imported_names(path)))]
    assert found == []
