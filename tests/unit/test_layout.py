"""Imports point one way. This table is the map of the package; a module that is not on it has to be put there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).resolve().parent

# what each module may import of paceline; `family.*` stands for every file of a folder
MAY_IMPORT = {
    "errors": "",
    "interrupts": "",
    "system_limits": "",
    "seeds": "",
    "limits": "",
    "state": "errors",
    "ops": "state",
    "ledger": "state",
    "result": "state",
    "scheme": "errors ops state",
    "rules": "errors scheme state",
    "worker": "errors ops seeds state",
    "task": "errors state",
    "feed": "errors seeds task",
    "torch_task": "errors feed state task",
    "desk": "errors ledger ops scheme state",
    "drive": "errors ops scheme worker",
    "hook": "result state task worker",
    "reading": "errors interrupts",
    "find": "data errors hook reading rules scheme sim.laws task",
    "values": "errors rules scheme",
    "config": "errors find hook rules scheme task values",
    "schemes.*": "errors limits rules scheme schemes.* state worker",
    "tasks.*": "data errors feed seeds state task tasks.* torch_task",
    "hooks.*": "errors hook hooks.* reading scheme state task values",
    "data.*": "data data.* errors feed seeds",
    "durable": "errors",
    "checkpoint": "durable errors paceline",
    "file_sums": "durable errors",
    "directory": "durable errors file_sums",
    "sums": "errors state task torch_task",
    "fingerprint": "durable errors file_sums find hook paceline plan rules scheme state sums task values",
    "verification": "checkpoint config directory errors file_sums fingerprint journal plan replaying.* "
    "result scheme sums task trained",
    "difference": "checkpoint directory errors fingerprint replaying.* result state",
    "replaying.*": "checkpoint config desk directory drive durable errors feed file_sums fingerprint journal ops plan "
    "replaying.* result role scheme state sums task torch_task transports.lane worker",
    "recording": "checkpoint config durable hook journal plan stage",
    "cli_replay": "config directory durable errors replaying.*",
    "trained": "checkpoint config directory errors state task torch_task",
    # real processes: memory, words and bells; the stage on which the roles meet; what each role does there
    "memory": "errors",
    "wire": "errors",
    "carry": "errors memory",
    "control": "",
    "net.*": "errors net.*",
    "plan": "errors task",
    "exact": "errors plan scheme task",
    "hosting": "",
    "board": "memory",
    "cores": "",
    "journal": "errors",
    "accounts": "checkpoint ledger result scheme state",
    "stage": "accounts board config ledger memory net.* plan result scheme seeds state",
    "mirror": "board stage",
    "snapshots": "board checkpoint config errors plan scheme stage state",
    "transports": "",
    "transports.lane": "errors ops scheme stage transports.wire wire",
    "transports.recycled": "",
    "transports.wire": "memory net.* wire",
    "transports.pieces": "memory stage transports.wire wire",
    "transports.landing": "memory transports.wire",
    "transports.owed": "stage transports.lane",
    "transports.tcp": "board errors net.* stage transports.landing transports.lane transports.pieces transports.wire "
    "wire",
    "transports.door": "board config errors memory net.* stage transports.lane transports.owed transports.pieces "
    "transports.tcp transports.wire wire",
    "transports.shared": "board errors journal ops scheme stage state transports.landing transports.lane "
    "transports.pieces transports.recycled transports.tcp wire",
    "transports.shared_desk": "board desk errors journal ops stage transports.door transports.lane transports.pieces "
    "wire",
    "transports.inproc": "board config desk errors ops snapshots stage transports.lane transports.shared",
    "collectives": "",
    "collectives.shared": "board errors journal ops seeds stage state wire",
    "collectives.group": "errors state",
    "collectives.torch_group": "collectives.group net.* state",
    "collectives.tcp_group": "collectives.group errors net.* state",
    "collectives.connections": "collectives.group errors net.* stage",
    "collectives.circle": "board collectives.group errors",
    "collectives.assembly": "board collectives.circle collectives.connections collectives.group collectives.tcp_group "
    "collectives.torch_group errors journal net.* ops stage state transports.shared wire",
    "collectives.distributed": "collectives.assembly collectives.circle collectives.group errors journal ops "
    "seeds state transports.shared",
    "view": "board config control drive errors journal result snapshots stage state task transports.lane "
    "transports.shared worker",
    "membership": "board collectives.distributed collectives.shared drive hook journal ops recording result "
    "snapshots state transports.lane transports.shared view",
    "saving": "board durable errors membership snapshots transports.lane view",
    "session": "board collectives.distributed collectives.shared control desk drive errors hook journal ops "
    "recording saving seeds stage state task transports.lane transports.shared worker",
    "server": "board config journal ops recording snapshots stage transports.door transports.lane transports.pieces "
    "transports.shared_desk wire",
    "evaluator": "board checkpoint control errors hooks.* snapshots stage task",
    "role": "board checkpoint config control cores directory errors evaluator hook hooks.* hosting plan scheme "
    "server session snapshots stage system_limits task torch_task",
    "launchers": "",
    "launchers.process": "control interrupts system_limits",
    "launchers.activity": "",
    "launchers.patience": "board launchers.activity launchers.recovery plan role",
    "launchers.program": "board carry control errors memory net.* plan role stage",
    "launchers.recovery": "board checkpoint control directory errors plan recording role scheme snapshots stage",
    "launchers.local": "board control directory errors interrupts launchers.activity launchers.patience "
    "launchers.process launchers.program launchers.recovery memory net.* plan role scheme",
    "launchers.job": "errors net.*",
    "launchers.talk": "errors memory net.* transports.wire",
    "launchers.way": "errors launchers.beside launchers.talk net.* stage",
    "launchers.quarters": "board errors launchers.beside launchers.talk launchers.way memory mirror net.* plan role "
    "snapshots stage",
    "launchers.beside": "errors",
    "launchers.gathering": "",
    "launchers.routes": "board",
    "launchers.agent": "board control errors launchers.activity launchers.gathering launchers.local launchers.patience "
    "launchers.process launchers.program launchers.quarters launchers.recovery launchers.talk launchers.way net.* role "
    "run",
    "launchers.peers": "checkpoint launchers.agent launchers.beside launchers.local launchers.program "
    "launchers.recovery launchers.talk memory mirror net.* role snapshots transports.wire",
    "launchers.hub": "board errors interrupts launchers.beside launchers.gathering launchers.local launchers.peers "
    "launchers.quarters launchers.recovery launchers.routes launchers.talk net.* plan role scheme stage",
    "partaking": "cluster.* errors interrupts launchers.agent launchers.gathering launchers.hub launchers.local "
    "launchers.way net.* plan scheme stage",
    "launchers.apart": "carry control errors interrupts launchers.local partaking plan report.* role",
    "launchers.__main__": "interrupts launchers.apart",
    "launchers.foreground": "checkpoint errors launchers.job",
    "launchers.mpi": "errors launchers.command launchers.foreground launchers.job",
    "launchers.torchrun": "cluster.* errors launchers.command launchers.foreground launchers.job",
    "launchers.hosts": "cluster.* errors launchers.command launchers.foreground launchers.job launchers.ssh",
    "launchers.ssh": "launchers.far",
    "launchers.far": "",
    "launchers.slurm": "cluster.* errors launchers.command launchers.foreground launchers.job launchers.slurm_gpus "
    "launchers.slurm_job launchers.slurm_memory",
    "launchers.slurm_gpus": "errors",
    "launchers.slurm_job": "errors interrupts",
    "launchers.slurm_memory": "errors",
    "launchers.command": "",
    "launchers.ray": "errors launchers.command launchers.job launchers.ray_crew",
    "launchers.ray_crew": "errors launchers.command launchers.job",
    "launchers.spark": "errors launchers.command launchers.job launchers.spark_seat",
    "launchers.spark_seat": "launchers.command",
    "launchers.kubernetes": "errors interrupts launchers.job launchers.kubernetes_manifests "
    "launchers.kubernetes_settings "
    "launchers.kubernetes_template",
    "launchers.kubernetes_manifests": "launchers.job launchers.kubernetes_pod launchers.kubernetes_settings "
    "launchers.kubernetes_template",
    "launchers.kubernetes_pod": "launchers.job launchers.kubernetes_settings launchers.kubernetes_template",
    "launchers.kubernetes_settings": "errors launchers.foreground launchers.job launchers.kubernetes_template net.*",
    "launchers.kubernetes_template": "errors",
    "watching": "board report.live role",
    "progress": "directory durable errors hook hooks.* plan report.live",
    "run": "accounts checkpoint config directory errors exact file_sums fingerprint hook interrupts launchers.local "
    "launchers.recovery plan progress recording report.* result role scheme snapshots state system_limits task values "
    "watching",
    "training": "checkpoint config directory errors find hook interrupts launchers.apart partaking plan report.* "
    "result run scheme task",
    # a user's own loop
    "sharing": "errors seeds torch_task",
    "pace": "board errors hook ops result role session sharing snapshots state task torch_task",
    "alone": "accounts board checkpoint control directory errors fingerprint hook launchers.recovery memory plan role "
    "run scheme session stage task transports.inproc",
    "attaching": "alone board config control errors find hook pace plan role run scheme seeds session stage",
    "report.*": "checkpoint config difference directory errors find progress report.* result scheme values "
    "verification",
    "sim.laws": "errors",
    "sim.cost": "errors sim.laws",
    "sim.faults": "errors",
    "sim.schedule": "errors seeds sim.faults",
    "sim.accounts": "sim.seat",
    "sim.crossing": "",
    "sim.servers": "desk ledger ops scheme sim.crossing sim.faults state",
    "sim.recovery": "scheme sim.cost sim.seat sim.servers",
    "sim.pieces": "ops seeds sim.crossing sim.seat",
    "sim.meeting": "errors ops state",
    "sim.seat": "drive ops sim.faults state task worker",
    "sim.session": "config errors hook result state worker",
    "sim.stuck": "errors ops sim.seat",
    "sim.life": "sim.faults sim.seat",
    "sim": "",
    "sim.engine": "desk drive errors ops result scheme seeds sim.accounts sim.cost sim.crossing sim.faults sim.life "
    "sim.meeting sim.pieces sim.recovery sim.seat sim.servers sim.stuck state task worker",
    "sim.snapshot": "errors sim.engine sim.seat",
    "sim.run": "config errors exact hook result scheme sim.cost sim.engine sim.faults sim.schedule sim.session "
    "task values",
    "cluster.*": "cluster.* durable errors reading",
    "cli_cluster": "cli_far cluster.* durable errors",
    "cli_far": "cluster.* errors launchers.job net.* plan role scheme",
    "cli": "cli_cluster cli_replay cli_runs cli_train cli_verify config data errors find interrupts paceline "
    "report report.* result sim.cost sim.engine sim.faults sim.run system_limits",
    "cli_train": "cli_far config directory errors interrupts launchers.local launchers.program partaking plan report.* "
    "result role run scheme training",
    "cli_verify": "difference durable report report.* verification",
    "cli_runs": "directory durable errors report.* torch_task trained",
    "__init__": "interrupts",  # each name is loaded when it is used
    "start": "cli interrupts",
    "__main__": "start",
}

# inside a function, where the name is needed when it runs: a scheme's rule may be given by its name; a role may run a
# script, in which `attach` needs what the role is made of; only the child of `launchers.apart` becomes a launcher; a
# command hears signals before it loads anything
LATER = {("start", "cli"), ("scheme", "values"), ("role", "attaching"), ("launchers.apart", "run")}

# the only module that hands objects from a process to its own children
CARRIES = "carry"

# where time is real; everywhere else it is the simulator's own, or no matter
CLOCKS = {
    *("checkpoint", "directory", "cli", "data", "report"),  # what lies on disk is dated, people see how long it takes
    *("stage", "board", "launchers", "watching", "progress", "run"),  # the run's own clock, and its patience
    "collectives",  # time-outs of torch.distributed and of connections
    "net",  # a stranger's time is bounded
    "cluster.meeting",  # a store's time limit
    *("transports", "snapshots", "session", "view"),  # a glance aside lets whoever shares the core go on
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


def entry(module: str) -> str | None:
    """The line of the table that speaks of a module."""
    if module in MAY_IMPORT:
        return module
    family = module.partition(".")[0] + ".*"
    return family if family in MAY_IMPORT else None


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules of paceline that a file imports, and whether at its top; what only the type checker sees is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str) -> None:
    line = entry(module)
    assert line is not None, f"paceline/{module} is not in the table: say there what it may import"
    allowed = set(MAY_IMPORT[line].split())
    for other, _ in imported(MODULES[module]):
        family = other.partition(".")[0] + ".*"
        fits = other in allowed or family in allowed or (module, other) in LATER
        assert fits, f"{module} imports {other}; it may import {', '.join(sorted(allowed)) or 'nothing of paceline'}"


def test_the_table_has_no_dead_lines() -> None:
    assert {entry(module) for module in MODULES} >= set(MAY_IMPORT)


def test_no_module_needs_itself() -> None:
    """Without what functions import later there is no circle: any module can be read alone."""
    needs = {module: {other for other, top in imported(path) if top} for module, path in MODULES.items()}
    done: set[str] = set()
    while len(done) < len(needs):
        ready = {module for module in needs.keys() - done if needs[module] - {"paceline", module} <= done}
        assert ready, f"a circle among {sorted(needs.keys() - done)}"
        done |= ready


def schemes() -> list[Path]:
    return sorted((ROOT / "schemes").glob("*.py"))


@pytest.mark.parametrize("path", schemes(), ids=lambda path: path.stem)
def test_a_scheme_imports_little(path: Path) -> None:
    """Torch, the standard library's plainest parts, and what a scheme is made of: it cannot know its world."""
    allowed = {"__future__", "collections", "dataclasses", "math", "typing", "torch", "itertools", "functools"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] in allowed | {"paceline"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_files_are_named_after_what_they_hold(module: str) -> None:
    assert not set(module.split(".")) & FORBIDDEN_NAMES


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_ever_unpickled(module: str) -> None:
    """Data are bytes with names: reading them must never run code."""
    source = MODULES[module].read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            roots = {name.partition(".")[0] for name in names}
            picklers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & roots
            assert not picklers or module == CARRIES, f"{module} imports {picklers}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"torch.load", "torch.save", "eval", "exec", "pickle.loads"}
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert keywords.get("allow_pickle", "False") == "False"


@pytest.mark.parametrize("module", MODULES)
def test_no_clock_and_no_event_loop_in_the_core(module: str) -> None:
    """Time is the simulator's own where it is not real, and steps are driven without asyncio."""
    clocks = {"time", "datetime"} if {module, module.partition(".")[0]} & CLOCKS else set()
    if module.partition(".")[0] == "data":
        clocks.add("threading")  # a download has a watchdog
    if module == "interrupts":
        clocks.add("threading")  # signals are the main thread's
    if module == "role":
        clocks.add("threading")  # a signal that may be meant for all is acted on a little later
    if module in ("hosting", "transports.tcp", "transports.wire"):
        clocks.add("threading")  # several workers in one process; a courier that sends while its worker computes
    if module.startswith("collectives."):
        clocks.add("threading")  # who makes a group waits for others: that is done aside, and a mean goes on meanwhile
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not ({"asyncio", "time", "datetime", "random", "threading"} - clocks) & set(names)
