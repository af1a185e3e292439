"""Training from Python: `train(task, scheme, …)` and `train_and_evaluate`, from scripts and notebooks."""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.api.detached import launch
from paceline.compressor import Compressor
from paceline.config import build, discovery, from_plan
from paceline.config.optimizer_argument import OptimizerArgument, ScheduleArgument, with_optimizer
from paceline.config.options import Quorum, Start, declared
from paceline.config.plan import Plan
from paceline.config.validate import own_objects, planned
from paceline.config.work import one_unit, settled
from paceline.errors import RunError, UsageError
from paceline.fields import Feed
from paceline.hook import Hook
from paceline.network.nodes import participate
from paceline.processes.supervisor.status import Status
from paceline.report.live import Display
from paceline.report.notebook import NotebookDisplay
from paceline.result import Result
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory, is_run
from paceline.schedules import Unit
from paceline.scheme import Scheme
from paceline.signals import EXIT_CODE
from paceline.task import Task


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run of `train`. `result`: what it had reached, None before its first checkpoint; `directory`:
    its run directory; `resume`: the arguments with which `train` resumes it."""

    def __init__(self, directory: Path, result: Result | None) -> None:
        self.directory, self.result = str(directory), result
        self.resume: dict[str, Any] = {"directory": self.directory, "resume": True} if is_run(directory) else {}
        after = f"after {result.updates:,} updates" if result is not None else "before its first checkpoint"
        again = ", ".join(f"{key}={value!r}" for key, value in self.resume.items())
        super().__init__(f"the run was interrupted {after}; resume it by the same call with {again}")


def train(
    task: str | Task | None = None,
    scheme: str | Scheme | type[Scheme] = "sync",
    *,
    workers: int | None = None,
    servers: int = 1,
    steps: int | None = 1000,
    samples: int | None = None,
    epochs: float | None = None,
    seconds: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    compress: str | Compressor = "",
    exact: bool = False,
    micro: int | None = None,
    inside: str = "",
    hooks: Iterable[str | Hook] = (),
    quorum: Quorum | None = None,
    patience: float = 30.0,
    restarts: int = 3,
    start: Start = "fork",
    device: str = "cpu",
    collective: str = "shared",
    threads: int = 1,
    feed: Feed | None = None,
    shuffle: bool | None = None,
    task_options: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    checkpoint_steps: int | None = None,
    checkpoint_seconds: float | None = 60.0,
    keep: int = 5,
    evaluator: bool = False,
    throttle: float = 0.0,
    start_delay: float = 0.0,
    eval_steps: int | None = None,
    eval_device: str = "",
    best: str = "",
    every: int = 0,
    summaries: bool = True,
    record: bool = True,
    profile: bool = False,
    curvature: float | None = None,
    say: Callable[[str], None] | None = None,
    watch: Callable[[Status], None] | None = None,
    optimizer: OptimizerArgument | None = None,
    schedule: ScheduleArgument | None = None,
    schedule_unit: Unit = "updates",
    **hyper: Any,
) -> Result:
    """Train in real processes on this machine until the centre has had `steps` updates (or `seconds` have passed).

    `samples` or `epochs` in place of `steps` give schemes equal work: they are converted to updates, rounded up.

    The arguments that `simulate` has mean the same here; `Plan` declares each of them. `directory` keeps checkpoints,
    logs and summaries (default: a new one under runs/); `resume=True` resumes the run in it from its newest checkpoint.
    With `evaluator` another process evaluates the checkpoints and keeps the best. A task, scheme or hook may be an
    object of the caller's own, also one defined in a notebook. With `exact` every batch is split into `micro` parts
    (default: 8), which the processes share: neither the number of processes nor a failure changes a bit of the result.
    `compress` is a compressor for what workers send ("topk:0.01"): docs/compression.md. `inside` makes each worker
    several processes, which slice its batches ("ddp:2", "fsdp:2"): docs/inside.md.
    The work is done by other processes; this one waits, and forwards Ctrl-C: the run ends in order, and
    `RunInterrupted`, a KeyboardInterrupt, has its `result` so far.

    `optimizer`, of torch.optim or a function of the model, takes the place of the scheme's rule; `schedule` (a function
    of the optimizer, or text) counts `schedule_unit`: docs/optimizers.md.

    In a cluster (TF_CONFIG, or the variables of an engine) every task runs the same program, and this call takes part
    in the run. The chief gets the result; the program of any other task ends here when the run is over, by SystemExit.
    """
    arguments = locals()
    settings = {name: arguments[one.argument] for name, one in declared(Plan).items() if name != "hooks"}
    settings = one_unit(settings, default=1000)
    seat = participate.here(directory)
    if seat is not None and not seat.chief:
        raise SystemExit(_took_part(own_objects(task, scheme, hooks, hyper), say))
    if seat is not None:
        counts = {"workers": workers, "servers": servers if servers != 1 else None}
        there = participate.counted(seat, counts, build.scheme_of(scheme, hyper))
        settings |= {name: there[name] for name in counts} | {"evaluator": evaluator or seat.evaluator}
        resume = resume or (directory is not None and is_run(Path(directory)))
    if isinstance(task, str) and ":" not in task:
        discovery.task(task)  # refuse a misspelt name before a directory is made
    options = dict(task_options or {})
    given = {"hooks": hooks, "task_options": options, **settings}
    plan, chosen, objects = planned(task, scheme, hyper=hyper, **given)
    if optimizer is not None or schedule is not None:
        job = from_plan.task_of(plan, objects)
        plan = settled(plan, chosen, job)
        added = with_optimizer(chosen, hyper, job, plan.workers, plan.steps, optimizer, schedule, schedule_unit)
        plan, chosen, objects = planned(task, scheme, hyper=hyper | added, **given)
    if checkpoint_seconds is None:
        plan = dataclasses.replace(plan, checkpoint_seconds=None)
    endless = all(length is None for length in (steps, samples, epochs, seconds))
    if endless and not hooks and not plan.evaluator:
        raise UsageError("nothing would end this run: give steps, samples, epochs, seconds, or a hook that stops it")
    name = f"{task if isinstance(task, str) else getattr(task, 'name', 'task')}-{chosen.name}"
    if resume and directory is None:
        raise UsageError("resume=True resumes an existing run: give its directory")
    if resume and directory:
        place = RunDirectory.open(directory)
    else:
        place = RunDirectory.create(directory, folder_name(name), prepared=seat is not None)
    plan = dataclasses.replace(plan, directory=str(place.path.absolute()), title=name)
    if not (place.path / "plan.json").exists():
        place.write_plan(dataclasses.asdict(plan))  # from now on the run can be resumed
    console = Console(stderr=True, highlight=False)
    shows = watch is None and (console.is_terminal or console.is_jupyter)
    with (NotebookDisplay() if console.is_jupyter else Display(console)) if shows else nullcontext() as display:

        def tell(kind: str, text: str) -> None:
            if say is not None:
                say(text)
            elif display is not None:
                display.tell(kind, text)
            elif kind != "say":
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            else:
                print(text, file=sys.stderr)

        look = watch or (display.update if display is not None else lambda _: None)
        try:
            launch(plan, objects, tell=tell, watch=look)
        except RunError as error:
            error.result = reached(place)
            raise
        except KeyboardInterrupt:
            place.write_interrupted()  # the launcher has done it, unless it was starting
            raise RunInterrupted(place.path, reached(place)) from None
    result = reached(place)
    if result is None:
        raise RunError(f"the run left no result in {place.path}")
    return result


def _took_part(objects: dict[str, Any], say: Callable[[str], None] | None) -> int:
    """Take part in the run of a cluster as a task other than the chief; gives the exit code."""
    show = say or (lambda text: print(text, file=sys.stderr))
    try:
        launch(None, objects, tell=lambda _, text: show(text), watch=lambda _: None)
    except KeyboardInterrupt:  # the run or this task was interrupted
        return EXIT_CODE
    return 0


def reached(place: RunDirectory) -> Result | None:
    """The result in a run directory; None if it has none."""
    told, found = place.result(), checkpoint.newest(place.checkpoints, lambda _: None)
    if told is None or found is None or "updates" not in told:
        return None
    return Result.from_dict(told, found.tensors["model"])


def folder_name(name: str) -> str:
    """The name with characters that a folder's name may have."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in Path(name).name)


@dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains: a task under a scheme, for at most `max_steps` updates."""

    task: str | Task
    scheme: str | Scheme | type[Scheme] = "sync"
    max_steps: int | None = None
    hooks: tuple[str | Hook, ...] = ()
    hyper: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalSpec:
    """How `train_and_evaluate` evaluates: `steps` batches of the test data (None: all), at most every `throttle`
    seconds, not before `start_delay`. The best checkpoint by `metric` is kept."""

    steps: int | None = None
    throttle: float = 0.0
    start_delay: float = 0.0
    metric: str = ""


def train_and_evaluate(train_spec: TrainSpec, eval_spec: EvalSpec | None = None, **settings: Any) -> Result:
    """Train, evaluate every new checkpoint in another process, and keep the best.

    `settings` are those of `train`. It ends when training ends or its data run out.
    """
    evaluation = eval_spec or EvalSpec()
    more = settings.pop("hooks", ())
    settings.setdefault("checkpoint_seconds", max(evaluation.throttle, 1.0))
    return train(
        train_spec.task,
        train_spec.scheme,
        steps=train_spec.max_steps,
        hooks=(*train_spec.hooks, *([more] if isinstance(more, str | Hook) else more)),
        evaluator=True,
        throttle=evaluation.throttle,
        start_delay=evaluation.start_delay,
        eval_steps=evaluation.steps,
        best=evaluation.metric,
        **settings,
        **train_spec.hyper,
    )
