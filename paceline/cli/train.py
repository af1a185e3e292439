"""The commands that train in real processes: `paceline train`, `paceline run`."""

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.markup import escape

from paceline import signals
from paceline.api.execute import execute
from paceline.api.train import folder_name, train
from paceline.cli import cluster_options, console
from paceline.cli.commands import RunOptions, TrainOptions
from paceline.cli.console import messages, say, screen
from paceline.cli.options import print_json
from paceline.cli.watch import page_of
from paceline.config import build, discovery, work
from paceline.config.from_plan import ready_task, scheme_of
from paceline.config.options import declared
from paceline.config.plan import Plan
from paceline.config.validate import check, no_servers, planned
from paceline.errors import DataError, UsageError
from paceline.network.cluster.assignment import Assignment
from paceline.network.nodes import participate
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.report import tables
from paceline.report.live import Display
from paceline.report.profile_table import profile_table
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme


def train_command(asked: TrainOptions, settings: dict[str, Any]) -> None:
    task, words, resume, directory, scheme = asked.task, asked.words, asked.resume, asked.directory, asked.scheme
    if resume is not None and task is not None and "=" in task:  # the run has its task: this is the first of the words
        words, task = [task, *words], None
    hyper, task_options = build.split(words, train, Plan, TrainOptions)
    hooks = settings.pop("hooks", [])
    if task_options:
        settings["task_options"] = task_options
    if asked.watch and asked.on is not None:
        raise UsageError("--watch does not go with --on: use `paceline watch RUN` where the run directory can be seen")
    seat = _assignment(asked, settings.get("servers"))
    fixed = cluster_options.fixed_ports(asked.ports, seat is not None or asked.on is not None)
    network = participate.Network(
        asked.interface,
        not asked.no_ib,
        participate.JOIN if asked.join is None else asked.join,
        asked.tls,
        not asked.apart,
        asked.join_policy or participate.JOIN_POLICY,
        fixed,
    )
    if seat is not None and not seat.chief:
        leave_with(lambda: participate.take_part(seat, network, directory, say))
    if seat is not None:
        settings = participate.counted(seat, settings, build.scheme_of(scheme or "sync", hyper))
        if directory is not None and (Path(directory) / "plan.json").exists():
            resume, directory, task, scheme = directory, None, None, None  # an engine has restarted the chief

    def submit(plan: Plan, chosen: Scheme, place: Path) -> NoReturn:
        submitted = dataclasses.replace(plan, directory=str(place.absolute()))
        leave_with(lambda: cluster_options.submit(asked, submitted, chosen, fixed))

    if resume is not None:
        if directory is not None:
            raise UsageError("--resume names the run directory itself; omit --dir")
        place, plan, chosen = resumed(resume, task, scheme, hyper, hooks, settings)
        objects = {"ready": ready_task(plan, {})}
        if seat is not None:
            participate.check_means(plan, network)
    else:
        if task is None:
            raise UsageError("what is to be trained? give a task (`paceline list tasks`), or --resume RUN")
        if not settings.keys() & {*work.UNITS, "seconds"} and not any(one.startswith("stop-at-step") for one in hooks):
            settings["steps"] = 1000
        name = f"{task}-{scheme or 'sync'}"
        plan, chosen, _ = planned(task, scheme or "sync", hooks=hooks, hyper=hyper, **settings)
        plan = dataclasses.replace(plan, title=name)
        if settings.get("servers") and not chosen.methods and seat is None:
            say(f"{chosen.name} has no server: --servers {settings['servers']} is not used")
        if seat is not None or asked.on is not None:
            participate.check_means(plan, network)
        objects = {"ready": ready_task(plan, {})}  # before anything is made: its name may be wrong, its data missing
        if asked.dry_run:
            submit(plan, chosen, Path(directory or f"runs/{folder_name(name)}"))
        # the command of another node may have made the directory, or have trained there
        typed_elsewhere = asked.on is not None and cluster_options.typed_on_every_node(asked.on, asked.engine)
        if typed_elsewhere and directory is not None and (Path(directory) / "plan.json").exists():
            place = RunDirectory.open(directory)
        else:
            prepared = seat is not None or typed_elsewhere
            place = RunDirectory.create(directory, folder_name(name), prepared=prepared)
    if asked.on is not None:
        submit(plan, chosen, place.path)
    launcher = None if seat is None else participate.hub_of(seat, network, str(place.path), say)
    with page_of(place.path) if asked.watch else nullcontext():
        conduct(place, plan, chosen, objects, as_json=asked.as_json, plain=asked.plain, launcher=launcher)


def _assignment(asked: TrainOptions, servers: int | None) -> Assignment | None:
    """What this process is in its cluster; None: it starts all roles itself, or has an engine start them."""
    if asked.on is not None:
        discovery.launcher(asked.on)  # refuses an unknown name before the run directory is made
        return None
    found = participate.assigned(
        lambda: cluster_options.described(asked, asked.cluster),
        asked.placement,
        servers,
        asked.address_rule,
        asked.directory,
    )
    if asked.dry_run or asked.engine:
        raise UsageError("--dry-run and --engine go with --on ENGINE")
    return found


def run_command(asked: RunOptions, settings: dict[str, Any]) -> None:
    script, directory, resume = asked.script, asked.directory, asked.resume
    if not script.is_file():
        raise UsageError(f"there is no program {str(script)!r}")
    for hook in settings.get("hooks", []):
        build.hook_of(hook)
    if resume and directory is None:
        raise UsageError("--resume resumes an existing run: name it with --dir")
    hyper, task_options = build.split(asked.words, train, Plan, RunOptions)
    if task_options:
        raise UsageError(f"--set task.{next(iter(task_options))}: a program has no task; its options follow --")
    plan = Plan(
        script=[str(script.absolute()), *asked.arguments],
        scheme=asked.scheme,
        hyper=hyper,
        workers=asked.workers,
        title=script.name,
        exact=asked.exact,
        prints=asked.prints,
        **settings,
    )
    chosen = scheme_of(plan, {})
    check(plan, chosen)
    place = RunDirectory.open(directory) if resume and directory else RunDirectory.create(directory, script.stem)
    with page_of(place.path) if asked.watch else nullcontext():
        conduct(place, plan, chosen, {}, as_json=asked.as_json, plain=asked.plain)


def resumed(
    path: str, task: str | None, scheme: str | None, hyper: dict[str, Any], hooks: list[str], settings: dict[str, Any]
) -> tuple[RunDirectory, Plan, Scheme]:
    """The plan of an existing run, with the options that are given now in place of its own."""
    place = RunDirectory.open(path)
    try:
        before = Plan.from_dict(place.plan())
    except DataError as error:
        error.add_note("give changes as options of --resume; to resume with the plan as it is, delete sums.json")
        raise
    if before.task is None:
        raise UsageError(f"{place.path} trained a task of a notebook or script: resume it from there")
    for name, wanted in (("task", task), ("scheme", scheme)):
        if wanted is not None and wanted != getattr(before, name):
            raise UsageError(f"{place.path} has {name} {getattr(before, name)!r}; it cannot be resumed with {wanted!r}")
    if settings.get("compress", before.compress) != before.compress:
        own = f"{place.path} was compressed by {before.compress or 'none'}"
        raise UsageError(f"{own}, whose memory is part of its state; it cannot be resumed with {settings['compress']}")
    if settings.get("exact") and not before.exact:
        raise UsageError(f"{place.path} is not exact and cannot become exact; start a new run with --exact")
    if before.exact:
        settings = _still_exact(place, before, settings)
    changed = settings | ({"hooks": hooks} if hooks else {}) | ({"hyper": before.hyper | hyper} if hyper else {})
    plan = work.resumed(before, changed)
    chosen = scheme_of(plan, {})
    if not chosen.methods:
        plan = dataclasses.replace(plan, servers=no_servers(chosen, settings.get("servers", 1)))
    check(plan, chosen)
    return place, plan, chosen


def _still_exact(place: RunDirectory, before: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    """An exact run may be resumed in another number of processes; the settings that its bits depend on must stay."""
    for name in ("micro", "feed", "quorum"):
        if settings.get(name, getattr(before, name)) != getattr(before, name):
            own = f"{place.path} is exact with {name} {getattr(before, name)}, on which its bits depend"
            raise UsageError(f"{own}; it cannot be resumed with {settings[name]}")
    workers = settings.get("workers", before.processes)
    return settings | {"processes": workers, "workers": before.workers}


def leave_with(code_of: Callable[[], int]) -> NoReturn:
    """End the command with an exit code. click would make "Aborted" and exit code 1 of a KeyboardInterrupt."""
    try:
        raise typer.Exit(code_of())
    except KeyboardInterrupt:
        raise signals.Interrupted from None


def conduct(
    place: RunDirectory,
    plan: Plan,
    scheme: Scheme,
    objects: dict[str, Any],
    *,
    as_json: bool,
    plain: bool,
    launcher: Callable[..., Supervisor] | None = None,
) -> None:
    """Be the launcher of a run, show its progress, and print its result."""
    plan = dataclasses.replace(plan, directory=str(place.path.absolute()))
    if not (place.path / "plan.json").exists():
        place.write_plan(dataclasses.asdict(plan))  # from now on the run can be resumed

    words = f"interrupted; resume with: {resume_command(place, plan)}\n"
    signals.part_with(words)

    def launched(*given: Any, **rest: Any) -> Supervisor:
        made = (launcher or Supervisor)(*given, **rest)
        signals.count_from_now_on(made.asked)  # also after the run, while its result is printed
        return made

    try:
        with Display(messages, plain=True if plain else None) as display:

            def tell(kind: str, text: str) -> None:
                if kind == "out" and not as_json and not screen.is_terminal:  # what a script prints, in a file or pipe
                    print(text, flush=True)
                else:
                    display.tell(kind, text)

            result = execute(plan, scheme, objects, tell=tell, watch=display.update, launcher=launched)
    except (KeyboardInterrupt, signals.Interrupted):
        messages.print(escape(words), soft_wrap=True, end="")
        signals.part_with("")  # it has been said
        place.write_interrupted()  # execute has done it, unless the signal came before
        raise typer.Exit(signals.EXIT_CODE) from None
    show(result, as_json=as_json)


def resume_command(place: RunDirectory, plan: Plan) -> str:
    """The command that resumes a run."""
    if not plan.script:
        return shlex.join(["paceline", "train", "--resume", str(place.path)])
    words = ["paceline", "run", "--workers", str(plan.workers), *(["--scheme", plan.scheme] if plan.scheme else [])]
    for name, one in declared(Plan).items():  # the command has all options; only a task's run takes them from the plan
        value = getattr(plan, name)
        if not one.option.run or value == one.default:
            continue
        if isinstance(value, bool):
            words.append(one.flag if value else one.flag.replace("--", "--no-", 1))
            continue
        for item in value if isinstance(value, list) else [value]:
            words += [one.flag, str(item)]
    if plan.prints != "chief":
        words += ["--prints", plan.prints]
    if plan.hyper:
        words += ["--set", *(f"{key}={value}" for key, value in plan.hyper.items())]
    return shlex.join([*words, "--resume", "--dir", str(place.path), "--", *plan.script])


def show(result: Result, *, as_json: bool) -> None:
    """Print a result."""
    if result.stopped:
        messages.print(f"stopped: {escape(result.stopped)}")
    if as_json:
        print_json(result.as_dict())
    else:
        screen.print(tables.closing(result))
        if result.profile is not None:
            console.show(profile_table(result.profile, result.directory))
