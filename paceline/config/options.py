"""How a setting of a run is declared: once, as a field of `Plan` or `Simulation`.

    keep: Annotated[int, Bound(1), Option("Newest checkpoints to keep.", run=True), NO_EFFECT] = 5

The command line, the arguments of `paceline.train` and `paceline.simulate`, the checks, the tables of
docs/command-line.md and the fingerprint follow from the declaration.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from paceline.fields import Bound, Feed, bounds, converted

NO_EFFECT = "changes no bit of the result: the fingerprint omits it"

Quorum = Literal["shrink", "hold"]
Start = Literal["fork", "exec"]

# the panels of --help
SAMPLES, FAILURES, DIRECTORY, EVALUATION = "Samples", "When processes fail", "Run directory", "Evaluation"
VIRTUAL, CLUSTER, OUTPUT = "Virtual time", "Several machines", "Output"


@dataclass(frozen=True)
class Option:
    """How people give a setting."""

    help: str
    flags: str = ""  # "--servers --ps"; empty: the name of the field
    panel: str = ""  # of --help; empty: the first one
    default: str | None = None  # what --help says; None: the default of the field
    argument: str = ""  # the keyword in Python; empty: the name of the field
    page: str = ""  # of docs/, which says more
    run: bool = False  # `paceline run` has it too
    needs: str = ""  # the flag without which it has no meaning
    metavar: str = ""
    positional: bool = False  # an argument of the command instead of a flag
    hidden: bool = False


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
        return self.option.flags.split() or [f"--{self.name.replace('_', '-')}"]

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
        if self.default is None or self.default is False or self.default in ("", [], (), math.inf, dataclasses.MISSING):
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@cache
def declared(cls: type) -> dict[str, Declared]:
    """The options that a dataclass declares, by the names of its fields."""
    return {one.name: one for one in _declared(cls)}


def _declared(cls: type) -> Iterator[Declared]:
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        hint, *notes = get_args(hints[field.name])
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is not None:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield Declared(field.name, hint, default, option)


@cache
def without_effect(cls: type) -> frozenset[str]:
    """The fields that change no bit of a result."""
    hints = get_type_hints(cls, include_extras=True)
    return frozenset(name for name, hint in hints.items() if NO_EFFECT in getattr(hint, "__metadata__", ()))


def checked(owner: str, cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the types and within the bounds that a dataclass declares; UsageError says what is allowed."""
    hints, values = get_type_hints(cls, include_extras=True), {}
    for name, value in settings.items():
        option = declared(cls).get(name)
        shown = option.argument if option is not None else name
        values[name] = value if isinstance(value, dict) else converted(owner, shown, value, hints[name])
        for bound in bounds(hints[name]):
            bound.check(owner, shown, values[name])
    return values


# declared in both, with one meaning
Batch = Annotated[
    int | None,
    Bound(1),
    Option("Samples per gradient; with --feed slice, of all workers together.", panel=SAMPLES, default="the task's"),
]
FeedOption = Annotated[
    Feed | None,
    Option(
        "shared: workers draw from all samples; shard: from disjoint parts; slice: they split one common batch.",
        panel=SAMPLES,
        default="the task's",
    ),
]
Shuffle = Annotated[
    bool | None,
    Option("Shuffle the samples, or take them in stored order.", "--shuffle/--no-shuffle", SAMPLES, "the task's"),
]
Seed = Annotated[int, Option("Seed of everything random.")]
Hooks = Annotated[
    list[str],
    Option("NAME:key=value,…, a name of `paceline list hooks`; may be repeated.", "--hook", page="hooks.md", run=True),
]
Exact = Annotated[
    bool,
    Option("The same bits for any number of workers and servers, and after any failure.", "--exact", page="exact.md"),
]
MICRO = Option("With --exact: the parts that every batch is split into.", default="8", page="exact.md")
QUORUM = Option(
    "While a worker is absent, barriers and means shrink (proceed without it) or hold (wait for it).",
    panel=FAILURES,
    default="shrink",
    run=True,
)
CURVATURE = Option(
    "Largest curvature of the loss, for stability warnings.", panel=EVALUATION, default="the task's, where it is known"
)
