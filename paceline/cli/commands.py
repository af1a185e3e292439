"""Every command: its name, what it takes, and the function that is loaded and called when it is chosen.

This module loads neither torch nor numpy: --help and shell completion need nothing else.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path

from paceline.cli import options
from paceline.config.comparison import ComparisonSettings
from paceline.config.options import CLUSTER, DIRECTORY, OUTPUT, Option, option
from paceline.config.plan import Plan, Prints
from paceline.config.planning import SCHEMES, PlanningSettings
from paceline.config.simulation import Simulation

LAUNCHERS = sorted(path.stem for path in Path(__file__).parents[1].joinpath("launchers").glob("[!_]*.py"))
RUN_FOLDER = Option("Run directory, new or empty.", DIRECTORY, flags="--dir", default="runs/TASK-SCHEME-NNN")


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `train` that have a launcher start the tasks."""

    on: str | None = option(
        None, f"Launcher that starts the tasks: {', '.join(LAUNCHERS)}, or a package's own.", CLUSTER, page="nodes.md"
    )
    dry_run: bool = option(False, "With --on: print what would be submitted.", CLUSTER)
    engine: list[str] = option(
        [], "KEY=VALUE for the launcher (`paceline show slurm`): nodes=4; may be repeated.", CLUSTER
    )


@dataclass(frozen=True)
class TrainOptions(options.ClusterTaskOptions, LaunchOptions):
    """Train in real processes, on this machine or a cluster.

    Without --on and without a cluster in the environment, every role is a process of this machine.
    """

    task: str | None = options.TASK.field(None)
    words: list[str] = options.WORDS.field([])
    scheme: str | None = options.SCHEME.field(None)
    data: str | None = options.DATA.field(None)
    directory: str | None = RUN_FOLDER.field(None)
    resume: str | None = option(
        None, "Resume this run from its newest checkpoint; other options replace those of its plan.", DIRECTORY
    )
    cluster: Path | None = options.CLUSTER_FILE.field(None)
    join: float | None = option(
        None, "Seconds to wait for the other tasks at the start.", CLUSTER, default="600", page="nodes.md#four-shells"
    )
    join_policy: str | None = option(
        None, "If a task has not joined by then: fail, go-on without it, or wait.", CLUSTER, default="fail"
    )
    tls: str | None = option(
        None,
        "Encrypt: CERTIFICATE,KEY[,AUTHORITY] in PEM, or `generated` (in a run directory that all tasks see).",
        CLUSTER,
        default="no encryption",
        page="security.md",
    )
    ports: str | None = option(
        None, "FIRST-LAST: the ports of all listeners.", CLUSTER, default="any free port", page="nodes.md#ports"
    )
    apart: bool = option(False, "Connect processes of one host by sockets, not by shared memory.", CLUSTER)
    as_json: bool = options.TABLE_AS_JSON.field(False)
    plain: bool = options.PLAIN.field(False)
    watch: bool = options.WATCH.field(False)


@dataclass(frozen=True)
class SimulateOptions:
    """Train in virtual time: real gradients, simulated failures."""

    task: str = options.TASK.field(MISSING)
    words: list[str] = options.WORDS.field([])
    scheme: str | None = options.SCHEME.field(None)
    data: str | None = options.DATA.field(None)
    as_json: bool = options.TABLE_AS_JSON.field(False)


@dataclass(frozen=True)
class CompareOptions:
    """Compare schemes on equal work: page, figures, tables, tests.

    Every scheme is run with several seeds. The same command goes on where it was interrupted.
    """

    task: str = options.TASK.field(MISSING)
    schemes: str = option(MISSING, "Schemes to compare: sync,async,downpour.", flags="--schemes -s")
    words: list[str] = option(
        [],
        "Hyper-parameters of all schemes that have them (lr=0.1) or of one (downpour.lr=0.02), and task.OPTION=….",
        metavar="[KEY=VALUE]...",
        positional=True,
    )
    data: str | None = options.DATA.field(None)
    as_json: bool = options.TABLE_AS_JSON.field(False)


@dataclass(frozen=True)
class PlanOptions:
    """Forecast how schemes scale: throughput, time, cost.

    Measures gradients here and simulates up to hundreds of workers on a network, with stragglers and failures.
    """

    task: str = options.TASK.field(MISSING)
    words: list[str] = option(
        [],
        "Hyper-parameters of all schemes that have them (window=10) or of one (diloco.window=100), and task.OPTION=….",
        metavar="[KEY=VALUE]...",
        positional=True,
    )
    schemes: str = option(SCHEMES, "Schemes to plan for.", flags="--schemes -s")
    data: str | None = options.DATA.field(None)
    as_json: bool = options.TABLE_AS_JSON.field(False)


@dataclass(frozen=True)
class RunOptions:
    """Run your own training script, once per worker.

    The script keeps its loop and calls paceline.attach.
    """

    script: Path = option(MISSING, "A Python program that calls paceline.attach.", positional=True)
    arguments: list[str] = option([], "Arguments of the program.", metavar="[ARGUMENT]...", positional=True)
    scheme: str | None = option(
        None,
        "Scheme in place of the program's; it keeps the program's hyper-parameters that it has.",
        flags="--scheme -s",
    )
    words: list[str] = option(
        [],
        "Hyper-parameters in place of the program's: --set lr=0.001 window=8.",
        flags="--set",
        metavar="KEY=VALUE...",
    )
    workers: int = option(2, "Worker processes; worker 0 is the chief.", flags="--workers -n")
    directory: str | None = RUN_FOLDER.field(None)
    resume: bool = option(False, "Resume the run in --dir.", DIRECTORY)
    prints: Prints = option(
        "chief",
        "Whose prints reach the terminal: the chief's, all workers' (with their names), or none's. All are in logs/.",
        OUTPUT,
        metavar="chief|all|none",
    )
    exact: bool = option(False, "", hidden=True)
    as_json: bool = options.TABLE_AS_JSON.field(False)
    plain: bool = options.PLAIN.field(False)
    watch: bool = options.WATCH.field(False)


@dataclass(frozen=True)
class RoleOptions:
    """Play one role of a run. Launchers start this; you do not."""

    name: str = option(MISSING, "chief, worker:N, server:N (or ps:N), evaluator", positional=True)
    handle: int = option(MISSING, "The descriptor by which a launcher hands everything over.")


@dataclass(frozen=True)
class RunsOptions:
    """List the runs of a folder."""

    root: Path = option(Path("runs"), "The folder that holds the runs.", positional=True)
    as_json: bool = option(False, "One JSON object per run on stdout.", flags="--json")


@dataclass(frozen=True)
class WatchOptions:
    """Show runs in the browser, while they train or later.

    The page is on this machine only and opens with the printed address. Ctrl-C ends it; the runs go on.
    """

    runs: list[str] = option(
        [],
        "Run directories, names under runs/, or folders of runs. Default: all of runs/.",
        metavar="[RUN]...",
        positional=True,
    )
    port: int = option(0, "Port of the page on 127.0.0.1.", default="any free port")
    parent: int = option(0, "", hidden=True)  # `train --watch`: the page ends with that process


@dataclass(frozen=True)
class ShowOptions:
    """Show a scheme, task, hook, launcher, … or a run.

    Of a member of a family: description, source, parameters, file. Of a run: plan, progress or result, checkpoints.
    """

    name: str = option(
        MISSING, "A scheme, task, rule, hook, launcher, compute law, data set, or a run.", positional=True
    )


@dataclass(frozen=True)
class EvaluateOptions:
    """Compute the metrics of a trained model on the test data."""

    run: str = options.RUN.field(MISSING)
    which: str = options.WHICH.field("newest")
    ema: bool = options.EMA.field(False)
    data: str | None = options.DATA.field(None)
    as_json: bool = options.AS_JSON.field(False)


@dataclass(frozen=True)
class PredictOptions:
    """Compute the outputs of a trained model for samples.

    The samples must have the form that they have in the data set. Prints a JSON line for each.
    """

    run: str = options.RUN.field(MISSING)
    inputs: list[Path] = option(
        [], "A .npy, .npz, .safetensors or .csv file, or images.", metavar="[INPUT]...", positional=True
    )
    given: list[Path] = option([], "The same, as an option.", flags="--input -i")
    which: str = options.WHICH.field("newest")
    output: Path | None = option(None, "Write the outputs of the model to this .npy file.", flags="--output -o")
    ema: bool = options.EMA.field(False)
    data: str | None = options.DATA.field(None)


@dataclass(frozen=True)
class ReplayOptions:
    """Repeat a recorded run and compare every recorded bit.

    It runs in one process, call by call; exit code 1 if a bit differs.
    """

    run: str = options.RUN.field(MISSING)
    until: int | None = option(None, "Stop at this update and print its state.")
    what_if: list[str] = option([], "KEY=VALUE of the server in place of the recorded one; may be repeated.")
    since: int = option(0, "The update from which --what-if holds.")
    save: Path | None = option(None, "Write the last vector to this safetensors file.")
    data: str | None = options.DATA.field(None)
    as_json: bool = options.AS_JSON.field(False)


@dataclass(frozen=True)
class TraceOptions:
    """Write the timeline of a recorded run, for Perfetto or Chrome.

    Gradients, calls, means and waits of every worker; updates, kills and restarts. Of a simulation: `paceline simulate
    --trace FILE`.
    """

    run: str = options.RUN.field(MISSING)
    out: Path | None = option(
        None, "File to write; compressed if it ends with .gz.", flags="--out -o", default="RUN-trace.json"
    )
    launch: int | None = option(None, "Which launch of a resumed run.", default="the last one")
    since: float = option(0.0, "Seconds after the start of the launch from which on.")
    until: float = option(0.0, "Seconds after the start of the launch until which.", default="its end")


@dataclass(frozen=True)
class SamplesOptions:
    """Count how often a recorded run has used each sample."""

    run: str = options.RUN.field(MISSING)
    sample: int | None = option(None, "Every use of this sample, instead of the sums.")
    data: str | None = options.DATA.field(None)
    as_json: bool = options.AS_JSON.field(False)


@dataclass(frozen=True)
class VerifyOptions:
    """Check the files of a run against each other.

    Checkpoints, digest, settings, data, fingerprint; exit code 1 if one does not match.
    """

    run: str = options.RUN.field(MISSING)
    data: str | None = options.DATA.field(None)
    as_json: bool = options.TABLE_AS_JSON.field(False)


@dataclass(frozen=True)
class DiffOptions:
    """Compare the bits of two runs.

    Prints where they first differ; exit code 1 if they do.
    """

    run: str = options.RUN.field(MISSING)
    other: str = option(MISSING, "The run to compare it with.", metavar="RUN", positional=True)
    as_json: bool = options.TABLE_AS_JSON.field(False)


@dataclass(frozen=True)
class ClusterOptions(options.ClusterTaskOptions):
    """Show the cluster of this process: tasks, roles, addresses.

    By its environment, by lists of hosts, or by a file.
    """

    file: Path | None = options.CLUSTER_FILE.field(None)
    servers: int | None = option(None, "With --placement pack or spread.", CLUSTER, flags="--servers --ps", default="1")
    as_json: bool = options.TABLE_AS_JSON.field(False)


@dataclass(frozen=True)
class ListOptions:
    """List schemes, tasks, hooks, launchers and other members.

    Families: schemes, tasks, rules, hooks, launchers, compute laws, data sets.
    """

    family: str | None = option(
        None, "schemes, tasks, rules, hooks, launchers, compute or data. Omit it for all.", positional=True
    )


@dataclass(frozen=True)
class DataOptions:
    """Download a data set, check its sums, print where it is."""

    name: str = option(MISSING, "A name of `paceline list data`.", positional=True)
    directory: str | None = option(None, "Look here first (or set PACELINE_DATA).", flags="--dir")


@dataclass(frozen=True)
class Command:
    """One command. `body` is called with an instance of `options`, and with a dictionary of the `settings` given."""

    name: str
    options: type
    body: str  # module:function
    settings: type | None = None
    hidden: bool = False


COMMANDS = (
    Command("train", TrainOptions, "paceline.cli.train:train_command", Plan),
    Command("simulate", SimulateOptions, "paceline.cli.simulate:simulate_command", Simulation),
    Command("compare", CompareOptions, "paceline.cli.compare:compare_command", ComparisonSettings),
    Command("plan", PlanOptions, "paceline.cli.plan:plan_command", PlanningSettings),
    Command("run", RunOptions, "paceline.cli.train:run_command", Plan),
    Command("runs", RunsOptions, "paceline.cli.runs:runs"),
    Command("watch", WatchOptions, "paceline.cli.watch:watch"),
    Command("show", ShowOptions, "paceline.cli.show:show"),
    Command("evaluate", EvaluateOptions, "paceline.cli.trained:evaluate"),
    Command("predict", PredictOptions, "paceline.cli.trained:predict"),
    Command("replay", ReplayOptions, "paceline.cli.replay:replay_command"),
    Command("trace", TraceOptions, "paceline.cli.trace:trace_command"),
    Command("samples", SamplesOptions, "paceline.cli.replay:samples_command"),
    Command("verify", VerifyOptions, "paceline.cli.verify:verify"),
    Command("diff", DiffOptions, "paceline.cli.verify:diff"),
    Command("cluster", ClusterOptions, "paceline.cli.cluster:cluster"),
    Command("list", ListOptions, "paceline.cli.list_members:list_members"),
    Command("data", DataOptions, "paceline.cli.show:data"),
    Command("role", RoleOptions, "paceline.cli.role:role", hidden=True),
)
