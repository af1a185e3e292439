"""`paceline train | run | simulate | runs | evaluate | predict | verify | diff | list | show | data`."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import paceline
from paceline import datasets, signals
from paceline.cli import cluster, replay, runs, train, verify
from paceline.config import discovery
from paceline.errors import DataError, PacelineError, RunError, UnknownName
from paceline.processes import resource_limits
from paceline.report import tables
from paceline.result import Result
from paceline.simulator.engine import SimulationEngine

EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed (NaN loss, deadlock, an error in a scheme or task); "
    "2 wrong usage (unknown name, value not allowed); 3 data missing or damaged; 130 interrupted."
)

app = typer.Typer(
    name="paceline",
    help="Data-parallel training in which how the workers keep pace is one argument.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
screen, messages = Console(highlight=False), Console(stderr=True, highlight=False)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Say the version and leave.")] = False) -> None:
    if version:
        screen.print(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.command(epilog=EXIT_CODES)
def simulate(
    task: Annotated[
        str, typer.Argument(help="A name of `paceline list tasks`, or file.py:task, or package.module:task.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Hyper-parameters (lr=0.1 rule=adam server.rule=adagrad) and task.OPTION=…"
        ),
    ] = None,
    scheme: Annotated[str, typer.Option("--scheme", "-s", help="A name of `paceline list schemes`.")] = "sync",
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Default: 4 (1 where there can be one only).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Updates of the centre.")] = 1000,
    batch: Annotated[
        int | None, typer.Option(help="Samples per gradient (with --feed slice: of all workers together).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    exact: train.Exact = None,
    micro: train.Micro = None,
    compute: Annotated[
        str, typer.Option(help="Seconds per gradient: a law of `paceline list compute`.")
    ] = "constant:1.0",
    speeds: Annotated[str, typer.Option(help="One factor per worker: 1,1,0.5")] = "",
    network: Annotated[str, typer.Option(help="latency=SECONDS,bandwidth=BYTES_PER_SECOND")] = "",
    link: Annotated[list[str] | None, typer.Option(help="RANK:latency=…,bandwidth=… for one worker's wire.")] = None,
    access: Annotated[
        str, typer.Option(help="Seconds of a pass over the shared vector (hogwild), a law.")
    ] = "exponential:0.1",
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="kill:1@step=20,back=5 | stop:… | partition:… | delay:… | random:seed=7,count=5; may be repeated."
        ),
    ] = None,
    servers: Annotated[int, typer.Option("--servers", "--ps", help="That the vector is cut among.")] = 1,
    checkpoint_every: Annotated[
        int, typer.Option(help="Updates between virtual checkpoints, for faults that lead back to one. 0: the start.")
    ] = 0,
    hook: Annotated[list[str] | None, typer.Option(help="NAME:key=value,…, a name of `paceline list hooks`.")] = None,
    quorum: Annotated[
        str | None, typer.Option(help="When a worker dies, a barrier will shrink or hold. Default: shrink.")
    ] = None,
    feed: Annotated[str | None, typer.Option(help="shared | shard | slice")] = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Or take samples in stored order.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="End after so much virtual time.")] = math.inf,
    every: Annotated[int, typer.Option(help="Evaluate every so many updates.")] = 0,
    curvature: Annotated[float | None, typer.Option(help="Of the loss, for stability warnings.")] = None,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    data: Annotated[str | None, typer.Option(help="A directory with data sets (or set PACELINE_DATA).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")] = False,
) -> None:
    """Train in virtual time: real gradients, simulated pace."""
    if data is not None:
        os.environ["PACELINE_DATA"] = data
    hyper, task_options = train.split(words or [], paceline.simulate)
    try:
        with _Bar(steps, scheme, task) as bar:
            result = paceline.simulate(
                task,
                scheme,
                workers=workers,
                steps=steps,
                batch=batch,
                seed=seed,
                exact=bool(exact),
                micro=micro,
                compute=compute,
                speeds=_numbers("speeds", speeds),
                network=network,
                links=link or [],
                access=access,
                faults=fault or [],
                servers=servers,
                checkpoint_steps=checkpoint_every,
                quorum=quorum,  # type: ignore[arg-type]
                feed=feed,  # type: ignore[arg-type]
                shuffle=shuffle,
                task_options=task_options,
                seconds=seconds,
                every=every,
                curvature=curvature,
                threads=threads,
                warn=bar.warn,
                watch=bar.watch,
                hooks=hook or [],
                say=lambda text: messages.print(escape(text)),
                **hyper,
            )
    except RunError as error:
        if as_json and error.result is not None:  # what was reached is not lost
            sys.stdout.write(json.dumps(error.result.as_dict() | {"error": str(error)}, allow_nan=False) + "\n")
        raise
    _notice(result)
    if result.stopped:
        messages.print(f"stopped: {escape(result.stopped)}")
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        for point in result.history:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in point.metrics.items())
            screen.print(f"update {point.update:>7,}  {point.seconds:>10,.5g} s  {shown}")
        screen.print(tables.closing(result))


app.command("train", epilog=EXIT_CODES)(train.train_command)
app.command("run", epilog=EXIT_CODES)(train.run_command)
app.command("role", hidden=True)(train.role_command)
app.command(epilog=EXIT_CODES)(runs.runs)
app.command(epilog=EXIT_CODES)(runs.evaluate)
app.command(epilog=EXIT_CODES)(runs.predict)
app.command(epilog=EXIT_CODES)(cluster.cluster)
app.command("replay", epilog=EXIT_CODES)(replay.replay_command)
app.command("samples", epilog=EXIT_CODES)(replay.samples_command)
app.command(epilog=EXIT_CODES)(verify.verify)
app.command(epilog=EXIT_CODES)(verify.diff)


@app.command("list")
def list_(
    family: Annotated[
        str | None, typer.Argument(help="schemes, tasks, rules, hooks, launchers, compute or data; default: all.")
    ] = None,
) -> None:
    """What there is: schemes, tasks, rules, hooks, launchers, compute laws, data sets."""
    if family is not None and family not in discovery.FAMILIES:
        raise UnknownName("family", family, discovery.FAMILIES)
    for name in [family] if family else discovery.FAMILIES:
        screen.print(tables.listing(name, discovery.FAMILIES[name]().values()))
        screen.print()


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A scheme, task, rule, hook, launcher, compute law, data set, or a run.")],
) -> None:
    """One thing: what it does, where it comes from, what it takes, which file it is; or a run, as it stands."""
    if runs.show_run(name):
        return
    family, found = discovery.anything(name)
    screen.print(f"[bold]{escape(found.name)}[/bold] ({family})")
    for paragraph in found.doc.split("\n\n"):
        # a listing keeps its lines, prose follows the width of the terminal
        screen.print(escape(paragraph if "  " in paragraph else paragraph.replace("\n", " ")) + "\n")
    table = tables.parameters(family, found)
    if table is not None:
        screen.print(table)
    screen.print(f"file: {escape(found.file)}")


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="A name of `paceline list data`.")],
    directory: Annotated[str | None, typer.Option("--dir", help="Look here first (or set PACELINE_DATA).")] = None,
) -> None:
    """Get a data set, check it against the published sums, and tell where it lies."""
    found = datasets.load(name, directory, say=lambda text: messages.print(escape(text)))
    if found.notice:
        raise DataError(found.notice)  # a run may go on with what stands in, but this is not what was asked for
    screen.print(f"{found.name}: {len(found.train[0]):,} to train, {len(found.test[0]):,} to test")
    screen.print(f"source: {escape(found.source)}")
    screen.print(f"lies in: {escape(str(found.path or 'an installed package'))}", soft_wrap=True)


class _Bar:
    """A live progress bar on a terminal's stderr; silent elsewhere."""

    def __init__(self, steps: int, scheme: str, task: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4g}  staleness {task.fields[staleness]:.2f}"),
            TimeRemainingColumn(),
            console=messages,
            transient=True,
            disable=not messages.is_terminal,
        )
        name = f"{scheme} on {task}"
        self._line = self._progress.add_task(escape(name), total=steps, loss=math.nan, staleness=0.0)
        self._shown = 0.0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def warn(self, text: str) -> None:
        messages.print(f"[bold yellow]warning:[/bold yellow] {escape(text)}", soft_wrap=True)

    def watch(self, engine: SimulationEngine) -> None:
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            staleness = engine.desk.ledger.mean() if engine.desk else 0.0
            self._progress.update(self._line, completed=engine.updates, loss=engine.loss, staleness=staleness)


def _notice(result: Result) -> None:
    if result.notice:
        messages.print(f"[bold yellow]notice:[/bold yellow] {escape(result.notice)}", soft_wrap=True)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in text.split(",") if item)
    except ValueError:
        raise paceline.UsageError(f"{name} must be numbers with commas between, not {text!r}") from None


def main(argv: list[str] | None = None, *, alone: bool = False) -> None:
    """Run the command line; errors of paceline's own become one clear line and an exit code. `alone`: the process ends
    with the command, and no signal may come between."""
    handlers = {number: signal.getsignal(number) for number in signals.ASKED}
    signals.raise_while_working()
    try:
        app(argv)
    except signals.Interrupted:
        messages.print("interrupted")
        raise
    except PacelineError as error:
        messages.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            messages.print(f"  {escape(note)}", soft_wrap=True)
        reached = error.result if isinstance(error, RunError) else None
        if reached is not None and reached.updates:
            messages.print(f"reached: {reached.updates:,} updates, {reached.samples:,} samples")
        raise SystemExit(error.exit_code) from None
    except (OSError, MemoryError, RuntimeError) as error:
        reason = resource_limits.explained(error)
        if reason is None:
            raise
        messages.print(f"[bold red]error:[/bold red] {escape(reason)}", soft_wrap=True)
        raise SystemExit(1) from None
    finally:
        if alone:
            signals.ignore()
        else:
            for number, handler in handlers.items():
                signal.signal(number, handler)
