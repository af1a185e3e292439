"""Every command: its name, what it takes, and the function that is loaded and called when it is chosen.

This module loads neither torch nor numpy: --help and shell completion need nothing else.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from paceline.cli import options
from paceline.config.options import CLUSTER, DIRECTORY, Option
from paceline.config.plan import Plan
from paceline.config.simulation import Simulation

LAUNCHERS = sorted(path.stem for path in Path(__file__).parents[1].joinpath("launchers").glob("[!_]*.py"))

SchemeOption = Annotated[
    str | None,
    Option("A name of `paceline list schemes`, file.py:Class or package.module:Class.", "--scheme -s", default="sync"),
]
RunFolder = Annotated[str | None, Option("Run directory, new or empty.", "--dir", DIRECTORY, "runs/TASK-SCHEME-NNN")]


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `train` that have a launcher start the tasks."""

    on: Annotated[
        str | None,
        Option(
            f"Launcher that starts the tasks: {', '.join(LAUNCHERS)}, or a package's own.",
            panel=CLUSTER,
            page="nodes.md",
        ),
    ] = None
    dry_run: Annotated[bool, Option("With --on: print what would be submitted.", "--dry-run", CLUSTER)] = False
    engine: Annotated[
        list[str],
        Option("KEY=VALUE for the launcher (`paceline show slurm`): nodes=4; may be repeated.", panel=CLUSTER),
    ] = field(default_factory=list)


@dataclass(frozen=True)
class TrainOptions(options.ClusterTaskOptions, LaunchOptions):
    """Train in real processes, on this machine or a cluster.

    Without --on and without a cluster in the environment, every role is a process of this machine.
    """

    task: options.TaskArgument = None
    words: options.Words = field(default_factory=list)
    scheme: SchemeOption = None
    data: options.DataDirectory = None
    directory: RunFolder = None
    resume: Annotated[
        str | None,
        Option("Resume this run from its newest checkpoint; other options replace those of its plan.", panel=DIRECTORY),
    ] = None
    cluster: options.ClusterFile = None
    join: Annotated[
        float | None,
        Option(
            "Seconds to wait for the other tasks at the start.",
            panel=CLUSTER,
            default="600",
            page="nodes.md#four-shells",
        ),
    ] = None
    join_policy: Annotated[
        str | None,
        Option("If a task has not joined by then: fail, go-on without it, or wait.", panel=CLUSTER, default="fail"),
    ] = None
    tls: Annotated[
        str | None,
        Option(
            "Encrypt: CERTIFICATE,KEY[,AUTHORITY] in PEM, or `generated` (in a run directory that all tasks see).",
            panel=CLUSTER,
            default="no encryption",
            page="security.md",
        ),
    ] = None
    ports: Annotated[
        str | None,
        Option(
            "FIRST-LAST: the ports of all listeners.", panel=CLUSTER, default="any free port", page="nodes.md#ports"
        ),
    ] = None
    apart: Annotated[
        bool, Option("Connect processes of one host by sockets, not by shared memory.", "--apart", CLUSTER)
    ] = False
    as_json: options.AsJson = False
    plain: options.Plain = False


@dataclass(frozen=True)
class SimulateOptions:
    """Train in virtual time: real gradients, simulated failures."""

    task: Annotated[
        str, Option("A name of `paceline list tasks`, or file.py:task, or package.module:task.", positional=True)
    ]
    words: options.Words = field(default_factory=list)
    scheme: SchemeOption = None
    data: options.DataDirectory = None
    as_json: options.AsJson = False


@dataclass(frozen=True)
class RunOptions:
    """Run your own training script, once per worker.

    The script keeps its loop and calls paceline.attach.
    """

    script: Annotated[Path, Option("A Python program that calls paceline.attach.", positional=True)]
    arguments: Annotated[list[str], Option("Arguments of the program.", metavar="[ARGUMENT]...", positional=True)] = (
        field(default_factory=list)
    )
    scheme: Annotated[str | None, Option("Scheme in place of the one that the program asks for.", "--scheme -s")] = None
    workers: Annotated[int, Option("Worker processes; worker 0 is the chief.", "--workers -n")] = 2
    directory: RunFolder = None
    resume: Annotated[bool, Option("Resume the run in --dir.", "--resume", DIRECTORY)] = False
    exact: Annotated[bool, Option("", "--exact", hidden=True)] = False
    as_json: options.AsJson = False
    plain: options.Plain = False


@dataclass(frozen=True)
class RoleOptions:
    """Play one role of a run. Launchers start this; you do not."""

    name: Annotated[str, Option("chief, worker:N, server:N (or ps:N), evaluator", positional=True)]
    handle: Annotated[int, Option("The descriptor by which a launcher hands everything over.")]


@dataclass(frozen=True)
class RunsOptions:
    """List the runs of a folder."""

    root: Annotated[Path, Option("The folder that holds the runs.", positional=True)] = Path("runs")
    as_json: Annotated[bool, Option("One JSON object per run on stdout.", "--json")] = False


@dataclass(frozen=True)
class ShowOptions:
    """Show a scheme, task, hook, launcher, … or a run.

    Of a member of a family: description, source, parameters, file. Of a run: plan, progress or result, checkpoints.
    """

    name: Annotated[
        str, Option("A scheme, task, rule, hook, launcher, compute law, data set, or a run.", positional=True)
    ]


@dataclass(frozen=True)
class EvaluateOptions:
    """Compute the metrics of a trained model on the test data."""

    run: options.RunArgument
    which: options.Which = "newest"
    ema: options.Averaged = False
    data: options.DataDirectory = None
    as_json: options.Json = False


@dataclass(frozen=True)
class PredictOptions:
    """Compute the outputs of a trained model for samples.

    The samples must have the form that they have in the data set. Prints a JSON line for each.
    """

    run: options.RunArgument
    inputs: Annotated[
        list[Path], Option("A .npy, .npz, .safetensors or .csv file, or images.", metavar="[INPUT]...", positional=True)
    ] = field(default_factory=list)
    given: Annotated[list[Path], Option("The same, as an option.", "--input -i")] = field(default_factory=list)
    which: options.Which = "newest"
    output: Annotated[Path | None, Option("Write the outputs of the model to this .npy file.", "--output -o")] = None
    ema: options.Averaged = False
    data: options.DataDirectory = None


@dataclass(frozen=True)
class ReplayOptions:
    """Repeat a recorded run and compare every recorded bit.

    It runs in one process, call by call; exit code 1 if a bit differs.
    """

    run: options.RunArgument
    until: Annotated[int | None, Option("Stop at this update and print its state.")] = None
    what_if: Annotated[list[str], Option("KEY=VALUE of the server in place of the recorded one; may be repeated.")] = (
        field(default_factory=list)
    )
    since: Annotated[int, Option("The update from which --what-if holds.")] = 0
    save: Annotated[Path | None, Option("Write the last vector to this safetensors file.")] = None
    data: options.DataDirectory = None
    as_json: options.Json = False


@dataclass(frozen=True)
class SamplesOptions:
    """Count how often a recorded run has used each sample."""

    run: options.RunArgument
    sample: Annotated[int | None, Option("Every use of this sample, instead of the sums.")] = None
    data: options.DataDirectory = None
    as_json: options.Json = False


@dataclass(frozen=True)
class VerifyOptions:
    """Check the files of a run against each other.

    Checkpoints, digest, settings, data, fingerprint; exit code 1 if one does not match.
    """

    run: options.RunArgument
    data: options.DataDirectory = None
    as_json: options.AsJson = False


@dataclass(frozen=True)
class DiffOptions:
    """Compare the bits of two runs.

    Prints where they first differ; exit code 1 if they do.
    """

    run: options.RunArgument
    other: Annotated[str, Option("The run to compare it with.", metavar="RUN", positional=True)]
    as_json: options.AsJson = False


@dataclass(frozen=True)
class ClusterOptions(options.ClusterTaskOptions):
    """Show the cluster of this process: tasks, roles, addresses.

    By its environment, by lists of hosts, or by a file.
    """

    file: options.ClusterFile = None
    servers: Annotated[int | None, Option("With --placement pack or spread.", "--servers --ps", CLUSTER, "1")] = None
    as_json: options.AsJson = False


@dataclass(frozen=True)
class ListOptions:
    """List schemes, tasks, hooks, launchers and other members.

    Families: schemes, tasks, rules, hooks, launchers, compute laws, data sets.
    """

    family: Annotated[
        str | None,
        Option("schemes, tasks, rules, hooks, launchers, compute or data. Omit it for all.", positional=True),
    ] = None


@dataclass(frozen=True)
class DataOptions:
    """Download a data set, check its sums, print where it is."""

    name: Annotated[str, Option("A name of `paceline list data`.", positional=True)]
    directory: Annotated[str | None, Option("Look here first (or set PACELINE_DATA).", "--dir")] = None


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
    Command("run", RunOptions, "paceline.cli.train:run_command", Plan),
    Command("runs", RunsOptions, "paceline.cli.runs:runs"),
    Command("show", ShowOptions, "paceline.cli.show:show"),
    Command("evaluate", EvaluateOptions, "paceline.cli.trained:evaluate"),
    Command("predict", PredictOptions, "paceline.cli.trained:predict"),
    Command("replay", ReplayOptions, "paceline.cli.replay:replay_command"),
    Command("samples", SamplesOptions, "paceline.cli.replay:samples_command"),
    Command("verify", VerifyOptions, "paceline.cli.verify:verify"),
    Command("diff", DiffOptions, "paceline.cli.verify:diff"),
    Command("cluster", ClusterOptions, "paceline.cli.cluster:cluster"),
    Command("list", ListOptions, "paceline.cli.list_members:list_members"),
    Command("data", DataOptions, "paceline.cli.show:data"),
    Command("role", RoleOptions, "paceline.cli.role:role", hidden=True),
)
