"""How a setting of a run is declared: once, as a field of `Plan` or `Simulation`.

    keep: int = option(5, "Newest checkpoints to keep.", bound=COUNT, run=True, no_effect=True)

The command line, the arguments of `paceline.train` and `paceline.simulate`, the checks, the tables of
docs/command-line.md and the fingerprint follow from the declaration.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from paceline.fields import Bound, converted

Quorum = Literal["shrink", "hold"]
Start = Literal["fork", "exec"]

COUNT, NATURAL, POSITIVE, FINITE = Bound(1), Bound(0), Bound(0, above=True), Bound(0, finite=True)
NO_EFFECT = {"no_effect": True}  # of a field that changes no bit of the result: the fingerprint omits it

# the panels of --help
SAMPLES, FAILURES, DIRECTORY, EVALUATION = "Samples", "When processes fail", "Run directory", "Evaluation"
VIRTUAL, CLUSTER, OUTPUT = "Virtual time", "Several machines", "Output"


@dataclass(frozen=True)
class Option:
    """How people give a setting."""

    help: str
    panel: str = ""  # of --help; empty: the first one
    flags: str = ""  # "--servers --ps"; empty: the name of the field
    default: str | None = None  # what --help says; None: the default of the field
    bound: Bound | None = None
    argument: str = ""  # the keyword in Python; empty: the name of the field
    page: str = ""  # of docs/, which says more
    run: bool = False  # `paceline run` has it too
    needs: str = ""  # the flag without which it has no meaning
    metavar: str = ""
    positional: bool = False  # an argument of the command instead of a flag
    hidden: bool = False

    def field(self, default: Any, *, no_effect: bool = False) -> Any:
        """A field of a dataclass that declares this option."""
        value = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
        return dataclasses.field(**value, metadata={"option": self, "no_effect": no_effect})


def option(initial: Any, help: str, panel: str = "", *, no_effect: bool = False, **rest: Any) -> Any:
    """A field that declares an option. `initial` is its default; `rest` are fields of `Option`."""
    return Option(help, panel, **rest).field(initial, no_effect=no_effect)


@dataclass(frozen=True)
class Declared:
    """One field of a dataclass that declares options."""

    name: str
    hint: Any
    default: Any
    option: Option

    @property
    def argument(self) -> str:
        return self.option.argument or self.name

    @property
    def flags(self) -> list[str]:
        name = self.argument.replace("_", "-")
        switch = self.kind is bool and self.default is not False  # it can be turned off, too
        return self.option.flags.split() or [f"--{name}/--no-{name}" if switch else f"--{name}"]

    @property
    def flag(self) -> str:
        """The flag that messages name."""
        return self.flags[0].partition("/")[0]

    @property
    def kind(self) -> Any:
        """The type without None: int, float, bool, str, a Literal, list[str]."""
        parts = get_args(self.hint)
        return next(one for one in parts if one is not type(None)) if type(None) in parts else self.hint

    @property
    def shown_default(self) -> str:
        """The default as people read it; empty where there is none to tell."""
        if self.option.default is not None:
            return self.option.default
        if self.default is True:
            return "yes"
        if self.default is None or self.default is False or self.default in ("", [], (), math.inf, MISSING):
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@cache
def declared(cls: type) -> dict[str, Declared]:
    """The options that a dataclass declares, by the names of its fields."""
    hints, found = get_type_hints(cls), {}
    for one in dataclasses.fields(cls):
        if "option" in one.metadata:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            found[one.name] = Declared(one.name, hints[one.name], default, one.metadata["option"])
    return found


@cache
def without_effect(cls: type) -> frozenset[str]:
    """The fields that change no bit of a result."""
    return frozenset(one.name for one in dataclasses.fields(cls) if one.metadata.get("no_effect"))


def checked(owner: str, cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the types and within the bounds that a dataclass declares; UsageError says what is allowed."""
    hints, values = get_type_hints(cls), {}
    for name, value in settings.items():
        one = declared(cls).get(name)
        shown = name if one is None else one.argument
        values[name] = converted(owner, shown, value, hints[name])
        if one is not None and one.option.bound is not None:
            one.option.bound.check(owner, shown, values[name])
    return values


# declared in both, with one meaning
BATCH = Option(
    "Samples per gradient; with --feed slice, of all workers together.", SAMPLES, default="the task's", bound=COUNT
)
FEED = Option(
    "shared: workers draw from all samples; shard: from disjoint parts; slice: they split one common batch.",
    SAMPLES,
    default="the task's",
)
SHUFFLE = Option("Shuffle the samples, or take them in stored order.", SAMPLES, default="the task's")
SAMPLE_COUNT = Option("Samples after which the run ends, rounded up to whole updates.", bound=COUNT, page="data.md")
EPOCHS = Option(
    "Passes over the training data after which the run ends: samples / training samples.",
    bound=POSITIVE,
    page="data.md",
)
SEED = Option("Seed of everything random.")
HOOKS = Option(
    "NAME:key=value,…, a name of `paceline list hooks`; may be repeated.", flags="--hook", page="hooks.md", run=True
)
COMPRESS = Option(
    "Compresses what workers send: NAME:VALUE or NAME:key=value,…, a name of `paceline list compressors`.",
    default="none, or that of the scheme's paper",
    page="compression.md",
    run=True,
)
EXACT = Option("The same bits for any number of workers and servers, and after any failure.", page="exact.md")
MICRO = Option("With --exact: the parts that every batch is split into.", default="8", bound=COUNT, page="exact.md")
INSIDE = Option(
    "Processes of each worker: ddp:K (each has the model) or fsdp:K (each has a shard of it); they slice its batches.",
    default="one process",
    page="inside.md",
)
QUORUM = Option(
    "While a worker is absent, barriers and means shrink (proceed without it) or hold (wait for it).",
    FAILURES,
    default="shrink",
    run=True,
)
CURVATURE = Option(
    "Largest curvature of the loss, for stability warnings.",
    EVALUATION,
    default="the task's, where it is known",
    bound=FINITE,
)
