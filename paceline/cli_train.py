"""The commands that train for real: `paceline train | run`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from paceline import cli_far, config, interrupts, partaking
from paceline.directory import RunDirectory
from paceline.errors import DataError, RunError, UsageError
from paceline.launchers import program
from paceline.launchers.local import Launcher
from paceline.plan import Plan
from paceline.report import tables
from paceline.report.live import Display
from paceline.result import Result
from paceline.role import scheme_of
from paceline.run import check, execute, planned, ready_task
from paceline.scheme import Scheme
from paceline.training import folder_name, train

# options whose name differs from the argument's
OPTIONS = {
    **{"checkpoint_steps": "checkpoint-every", "directory": "dir"},
    **{"hooks": "hook", "faults": "fault", "links": "link"},
}
screen, messages = Console(highlight=False), Console(stderr=True, highlight=False)

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Hyper-parameters (lr=0.1 server.rule=adagrad) and task.OPTION=…"),
]
Servers = Annotated[int | None, typer.Option("--servers", "--ps", help="Among whom the vector is cut. Default: 1.")]
Steps = Annotated[int | None, typer.Option(help="Updates of the centre, from the very beginning.")]
Seconds = Annotated[float | None, typer.Option(help="End after so much training time.")]
Hooks = Annotated[list[str] | None, typer.Option(help="NAME:key=value,…, a name of `paceline list hooks`.")]
QuorumOption = Annotated[str | None, typer.Option(help="When a worker dies, a barrier will shrink or hold.")]
Patience = Annotated[float | None, typer.Option(help="Seconds that any waiting may take. Default: 30.")]
Restarts = Annotated[int | None, typer.Option(help="Of a role in a row without progress. Default: 3.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda (one GPU per worker) or cuda:K.")]
CollectiveOption = Annotated[
    str | None,
    typer.Option(
        "--collective", help="For means: shared (memory), tcp, gloo or nccl. Default: shared, on several nodes tcp."
    ),
]
Threads = Annotated[int | None, typer.Option(help="Of torch, per process. Default: 1.")]
Place = Annotated[str | None, typer.Option("--dir", help="The run directory. Default: a new one under runs/.")]
Resume = Annotated[str | None, typer.Option(help="Go on with this run directory from its newest checkpoint.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Updates between two checkpoints.")]
CheckpointSeconds = Annotated[float | None, typer.Option(help="Seconds between two checkpoints. Default: 60.")]
Exact = Annotated[
    bool | None, typer.Option("--exact", help="The same bits with any number of workers, and whoever dies on the way.")
]
Micro = Annotated[int | None, typer.Option(help="With --exact: parts that each batch is cut in. Default: 8.")]
Keep = Annotated[int | None, typer.Option(help="Checkpoints that are kept. Default: 5.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live display.")]


def train_command(
    task: Annotated[
        str | None, typer.Argument(help="A name of `paceline list tasks`, or file.py:task, or package.module:task.")
    ] = None,
    words: Words = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", "-s", help="A name of `paceline list schemes`. Default: sync.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Default: 2 (1 where there can be one only).")
    ] = None,
    servers: Servers = None,
    steps: Steps = None,
    seconds: Seconds = None,
    batch: Annotated[int | None, typer.Option(help="Samples per gradient (--feed slice: of all workers).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random. Default: 0.")] = None,
    exact: Exact = None,
    micro: Micro = None,
    hook: Hooks = None,
    quorum: QuorumOption = None,
    patience: Patience = None,
    restarts: Restarts = None,
    start: Annotated[
        str | None, typer.Option(help="fork: roles begin at once; exec: each in a fresh interpreter.")
    ] = None,
    device: Device = None,
    collective: CollectiveOption = None,
    threads: Threads = None,
    feed: Annotated[str | None, typer.Option(help="shared | shard | slice")] = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Or take samples in stored order.")
    ] = None,
    directory: Place = None,
    resume: Resume = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_seconds: CheckpointSeconds = None,
    keep: Keep = None,
    evaluator: Annotated[
        bool | None, typer.Option("--evaluator", help="Another process follows the checkpoints and keeps the best.")
    ] = None,
    throttle: Annotated[float | None, typer.Option(help="Seconds between two of its evaluations.")] = None,
    start_delay: Annotated[float | None, typer.Option(help="Seconds before its first.")] = None,
    eval_steps: Annotated[int | None, typer.Option(help="Test batches that it takes. Default: all.")] = None,
    eval_device: Annotated[str | None, typer.Option(help="Where it computes: cpu, cuda, cuda:K. Default: cpu.")] = None,
    best: Annotated[str | None, typer.Option(help="The metric by which the best checkpoint is kept.")] = None,
    every: Annotated[int | None, typer.Option(help="The chief evaluates every so many updates.")] = None,
    curvature: Annotated[float | None, typer.Option(help="Of the loss, for stability warnings.")] = None,
    record: Annotated[
        bool | None, typer.Option("--record/--no-record", help="The order of everything, for `paceline replay`.")
    ] = None,
    summaries: Annotated[
        bool | None, typer.Option("--summaries/--no-summaries", help="For TensorBoard. Default: yes.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A directory with data sets (or set PACELINE_DATA).")] = None,
    on: cli_far.On = None,
    dry_run: cli_far.DryRun = False,
    engine: cli_far.EngineOptions = None,
    by: cli_far.By = None,
    worker_hosts: cli_far.WorkerHosts = "",
    ps_hosts: cli_far.PsHosts = "",
    chief_hosts: cli_far.ChiefHosts = "",
    evaluator_hosts: Annotated[str, typer.Option(help="Of the evaluator, which needs no address.")] = "",
    job_name: cli_far.JobName = None,
    task_index: cli_far.TaskIndex = None,
    cluster: cli_far.ClusterFile = None,
    interface: cli_far.InterfaceOption = None,
    no_ib: cli_far.NoIb = False,
    address_rule: cli_far.AddressRule = None,
    join: cli_far.Join = None,
    join_policy: cli_far.JoinPolicy = None,
    tls: cli_far.Tls = None,
    ports: cli_far.PortRange = None,
    apart: cli_far.Apart = False,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Train for real: one process per role, on this machine, as one task of a cluster, or handed to an engine."""
    if data is not None:
        os.environ["PACELINE_DATA"] = data
    if resume is not None and task is not None and "=" in task:  # the task is known: this is the first of the words
        words, task = [task, *(words or [])], None
    hyper, task_options = split(words or [], train)
    given: dict[str, Any] = {
        "workers": workers,
        "servers": servers,
        "steps": steps,
        "seconds": seconds,
        "batch": batch,
        "seed": seed,
        "exact": exact,
        "micro": micro,
        "quorum": quorum,
        "patience": patience,
        "restarts": restarts,
        "start": start,
        "summaries": summaries,
        "record": record,
        "device": device,
        "collective": collective,
        "threads": threads,
        "feed": feed,
        "shuffle": shuffle,
        "checkpoint_steps": checkpoint_every,
        "checkpoint_seconds": checkpoint_seconds,
        "keep": keep,
        "evaluator": evaluator,
        "throttle": throttle,
        "delay": start_delay,
        "eval_steps": eval_steps,
        "eval_device": eval_device,
        "best": best,
        "every": every,
        "curvature": curvature,
        "task_options": task_options or None,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    seat = None
    if on is not None:
        cli_far.known(on)
    else:
        lists = (worker_hosts, ps_hosts, chief_hosts, evaluator_hosts)
        seat = partaking.engaged(
            lambda: cli_far.described(lists, job_name, task_index, cluster), by, servers, address_rule, directory
        )
        if dry_run or engine:
            raise UsageError("--dry-run and --engine go with --on ENGINE")
    fixed = cli_far.fixed_ports(ports, seat is not None or on is not None)
    network = partaking.Network(
        interface,
        not no_ib,
        partaking.JOIN if join is None else join,
        tls,
        not apart,
        join_policy or partaking.JOIN_POLICY,
        fixed,
    )
    if seat is not None and not seat.chief:
        leave_with(lambda: partaking.take_part(seat, network, directory, complain))
    if seat is not None:
        settings = partaking.counted(seat, settings, config.scheme_of(scheme or "sync", hyper))
        if directory is not None and (Path(directory) / "plan.json").exists():
            resume, directory, task, scheme = directory, None, None, None  # an engine has started it again
    if resume is not None:
        if directory is not None:
            raise UsageError("--resume names the run directory itself; leave --dir away")
        place, plan, chosen = resumed(resume, task, scheme, hyper, hook or [], settings)
        objects = {"ready": ready_task(plan, {})}
        if seat is not None:
            partaking.check_means(plan, network)
    else:
        if task is None:
            raise UsageError("what is to be trained? give a task (`paceline list tasks`), or --resume RUN")
        if steps is None and seconds is None and not any(one.startswith("stop-at-step") for one in hook or []):
            settings["steps"] = 1000
        name = f"{task}-{scheme or 'sync'}"
        plan, chosen, _ = planned(task, scheme or "sync", hooks=hook or [], hyper=hyper, **settings)
        if seat is not None or on is not None:
            partaking.check_means(plan, network)
        objects = {"ready": ready_task(plan, {})}  # before anything is made: its name may be wrong, its data missing
        if dry_run:
            directory = str(Path(directory or f"runs/{folder_name(name)}").absolute())
            submitted = dataclasses.replace(plan, directory=directory, title=name)
            leave_with(lambda: cli_far.submit(on or "", submitted, chosen, engine or [], by, True, complain, fixed))
        # torchrun on several nodes is typed on each: another may have made the directory, or been at work there
        typed_elsewhere = on == "torchrun" and any(one.startswith("rdzv=") for one in engine or [])
        if typed_elsewhere and directory is not None and (Path(directory) / "plan.json").exists():
            place = RunDirectory.open(directory)
        else:
            prepared = seat is not None or typed_elsewhere
            place = RunDirectory.create(directory, folder_name(name), prepared=prepared)
        plan = dataclasses.replace(plan, title=name)
    if on is not None:
        submitted = dataclasses.replace(plan, directory=str(place.path.absolute()))
        leave_with(lambda: cli_far.submit(on, submitted, chosen, engine or [], by, dry_run, complain, fixed))
    launcher = None
    if seat is not None:
        launcher = partaking.hub_of(seat, network, str(place.path), complain)
    conduct(place, plan, chosen, objects, as_json=as_json, plain=plain, launcher=launcher)


def run_command(
    script: Annotated[Path, typer.Argument(help="A Python program that calls paceline.attach.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="For the program.")] = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", "-s", help="In place of the scheme that the program asks for.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-n")] = 2,
    servers: Servers = None,
    steps: Steps = None,
    seconds: Seconds = None,
    hook: Hooks = None,
    quorum: QuorumOption = None,
    patience: Patience = None,
    restarts: Restarts = None,
    threads: Threads = None,
    directory: Place = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --dir.")] = False,
    exact: Annotated[bool, typer.Option("--exact", hidden=True)] = False,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_seconds: CheckpointSeconds = None,
    keep: Keep = None,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Run your own training script, once per worker; it keeps its loop and calls paceline.attach."""
    if not script.is_file():
        raise UsageError(f"there is no program {str(script)!r}")
    given: dict[str, Any] = {
        "servers": servers,
        "steps": steps,
        "seconds": seconds,
        "quorum": quorum,
        "patience": patience,
        "restarts": restarts,
        "threads": threads,
        "checkpoint_steps": checkpoint_every,
        "checkpoint_seconds": checkpoint_seconds,
        "keep": keep,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    for one in hook or []:
        config.hook_of(one)
    if resume and directory is None:
        raise UsageError("--resume goes on with an existing run: name it with --dir")
    plan = Plan(
        script=[str(script.absolute()), *(arguments or [])],
        scheme=scheme,
        workers=workers,
        hooks=hook or [],
        title=f"{script.name}",
        exact=exact,
        **settings,
    )
    chosen = scheme_of(plan, {})
    check(plan, chosen)
    place = RunDirectory.open(directory) if resume and directory else RunDirectory.create(directory, script.stem)
    conduct(place, plan, chosen, {}, as_json=as_json, plain=plain)


def role_command(
    name: Annotated[str, typer.Argument(help="chief, worker:N, server:N (or ps:N), evaluator")],
    handle: Annotated[int, typer.Option(help="The descriptor by which a launcher hands everything over.")],
) -> None:
    """Play one role of a run. Launchers start this; you do not."""
    raise typer.Exit(program.play(name, handle))


def split(words: list[str], of: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hyper-parameters and options of the task, of `key=value` words; what `of` takes itself is an option."""
    given = config.pairs(words)
    task_options = {key.removeprefix("task."): value for key, value in given.items() if key.startswith("task.")}
    hyper = {key: value for key, value in given.items() if not key.startswith("task.")}
    for key in hyper.keys() & inspect.signature(of).parameters.keys():
        option = OPTIONS.get(key) or key.replace("_", "-")
        raise UsageError(f"{key!r} is not a hyper-parameter; if you mean the option, write --{option}")
    return hyper, task_options


def resumed(
    path: str, task: str | None, scheme: str | None, hyper: dict[str, Any], hooks: list[str], settings: dict[str, Any]
) -> tuple[RunDirectory, Plan, Scheme]:
    """An existing run's plan, with what is given now in place of what was given then."""
    place = RunDirectory.open(path)
    try:
        before = Plan.from_dict(place.plan())
    except DataError as error:
        error.add_note(
            "give what is to change as options of --resume; to resume with the plan as it is, delete sums.json"
        )
        raise
    if before.task is None:
        raise UsageError(f"{place.path} trained a task of a notebook or script: resume it from there")
    for name, wanted in (("task", task), ("scheme", scheme)):
        if wanted is not None and wanted != getattr(before, name):
            raise UsageError(f"{place.path} has {name} {getattr(before, name)!r}; it cannot go on with {wanted!r}")
    if settings.get("exact") and not before.exact:
        raise UsageError(f"{place.path} is not exact and cannot become so on the way; begin a new run with --exact")
    if before.exact:
        settings = _still_exact(place, before, settings)
    changed = settings | ({"hooks": hooks} if hooks else {}) | ({"hyper": before.hyper | hyper} if hyper else {})
    plan = dataclasses.replace(before, **changed)
    chosen = scheme_of(plan, {})
    if not chosen.methods:
        plan = dataclasses.replace(plan, servers=0)
    check(plan, chosen)
    return place, plan, chosen


def _still_exact(place: RunDirectory, before: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    """An exact run may go on in other processes; what its bits depend on stays."""
    for name in ("micro", "feed", "quorum"):
        if settings.get(name, getattr(before, name)) != getattr(before, name):
            raise UsageError(
                f"{place.path} is exact with {name} {getattr(before, name)}, on which its bits depend; it cannot go on "
                f"with {settings[name]}"
            )
    workers = settings.get("workers", before.processes)
    return settings | {"processes": workers, "workers": before.workers}


def leave_with(code_of: Callable[[], int]) -> NoReturn:
    """End the command with an exit code. click would make "Aborted" and exit code 1 of a KeyboardInterrupt."""
    try:
        raise typer.Exit(code_of())
    except KeyboardInterrupt:
        raise interrupts.Interrupted from None


def complain(text: str) -> None:
    """A line for people, whoever reads the results."""
    messages.print(escape(text), soft_wrap=True)


def conduct(
    place: RunDirectory,
    plan: Plan,
    scheme: Scheme,
    objects: dict[str, Any],
    *,
    as_json: bool,
    plain: bool,
    launcher: Callable[..., Launcher] | None = None,
) -> None:
    """Be the launcher, show what happens, and say how it ended."""
    plan = dataclasses.replace(plan, directory=str(place.path.absolute()))
    if not (place.path / "plan.json").exists():
        place.write_plan(dataclasses.asdict(plan))  # from now on the run can be resumed, however soon it is interrupted

    words = f"interrupted; resume with: {resume_command(place, plan)}\n"
    interrupts.part_with(words)

    def launched(*given: Any, **rest: Any) -> Launcher:
        made = (launcher or Launcher)(*given, **rest)
        interrupts.count_from_now_on(made.asked)  # also after the run: then only the result is left to be told
        return made

    try:
        with Display(messages, plain=True if plain else None) as display:

            def tell(kind: str, text: str) -> None:
                (display.say if kind == "say" else display.warn)(text)

            result = execute(plan, scheme, objects, tell=tell, watch=display.update, launcher=launched)
    except (KeyboardInterrupt, interrupts.Interrupted):
        messages.print(escape(words), soft_wrap=True, end="")
        interrupts.part_with("")  # it has been said
        place.write_interrupted()  # execute has done it, unless the signal came before
        raise typer.Exit(interrupts.EXIT_CODE) from None
    except RunError as error:
        if as_json and error.result is not None:  # what was reached is not lost
            sys.stdout.write(json.dumps(error.result.as_dict() | {"error": str(error)}, allow_nan=False) + "\n")
        raise
    show(result, as_json=as_json)


def resume_command(place: RunDirectory, plan: Plan) -> str:
    """What to type to continue a run."""
    if not plan.script:
        return shlex.join(["paceline", "train", "--resume", str(place.path)])
    scheme = ["--scheme", plan.scheme] if plan.scheme else []
    words = ["paceline", "run", "--workers", str(plan.workers), *scheme, "--resume", "--dir", str(place.path)]
    return shlex.join([*words, "--", *plan.script])


def show(result: Result, *, as_json: bool) -> None:
    if result.stopped:
        messages.print(f"stopped: {escape(result.stopped)}")
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        screen.print(tables.closing(result))
