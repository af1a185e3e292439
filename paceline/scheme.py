"""The contract of a scheme: fields as hyper-parameters, `@on_server` methods for the server, `step` for a worker."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    get_type_hints,
    overload,
)
from weakref import WeakKeyDictionary

from paceline.compressed_sites import SEND, CompressedSites
from paceline.compressor import Compressor, Fragment
from paceline.errors import SchemeError, UsageError
from paceline.fields import Bound, Component, Count, Fraction, Rate, converted
from paceline.formula import evaluated
from paceline.ops import MESSAGE_CELLS, Call, message_cells
from paceline.rules import SGD, Rule
from paceline.schedules import Schedule
from paceline.stability import Gain
from paceline.state import Cell, State, Vector, mean_of, sum_of

if TYPE_CHECKING:
    from paceline.worker import Worker

__all__ = ["Bound", "Count", "Fraction", "Rate", "Scheme", "State", "Vector", "mean_of", "on_server", "sum_of"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Guard = Callable[..., bool]
Named = tuple[tuple[str, tuple[int, ...]], ...]
COMPRESSED_SHAPES = "compress_shapes"  # the worker's cell with the shapes of the parameters


class ServerMethod(Generic[P, R]):
    """An `@on_server` method. Calling it builds a `Call`; the server runs `function` when the guard allows."""

    def __init__(self, function: Callable[..., R], when: Guard | None, atomic: bool, reads: bool = False) -> None:
        if not isinstance(function, FunctionType):
            raise SchemeError(f"@on_server takes a plain method, not {function!r}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise SchemeError(
                f"{function.__qualname__} is 'async def' under @on_server; the server never waits inside a call: "
                "make it a plain 'def' and put the waiting into when="
            )
        if when is not None and not atomic:
            raise SchemeError(f"{function.__qualname__}: a guarded method is atomic; drop when= or atomic=False")
        if reads and not atomic:
            raise SchemeError(f"{function.__qualname__}: reads=True is atomic; drop it or atomic=False")
        self.function = function
        self.when = when
        self.atomic = atomic
        self.reads = reads
        # it returns nothing and waits for nothing: in shared memory the worker continues at once
        self.silent = atomic and when is None and function.__annotations__.get("return", 0) in (None, "None")
        self.name = function.__name__
        self.signature = inspect.signature(function)
        self.parameters = tuple(self.signature.parameters)[2:]  # without self and s
        for name, parameter in self.signature.parameters.items():
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                raise SchemeError(f"{function.__qualname__}: {name!r} is a keyword only; a call crosses by position")
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, scheme: None, owner: type) -> ServerMethod[P, R]: ...
    @overload
    def __get__(self, scheme: object, owner: type) -> Callable[P, Call[R]]: ...
    def __get__(self, scheme: object | None, owner: type) -> Any:
        if scheme is None:
            return self

        def call(*args: P.args, **kwargs: P.kwargs) -> Call[R]:
            if kwargs or len(args) != len(self.parameters):
                bound = self.signature.bind(None, None, *args, **kwargs)
                bound.apply_defaults()
                return Call(self, bound.args[2:])
            return Call(self, args)

        return call

    def guard_text(self) -> str:
        """The source text of the guard."""
        if self.when is None:
            return "no guard"
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg == "when":
                    body = node.value.body if isinstance(node.value, ast.Lambda) else node.value
                    return ast.unparse(body)
        except (OSError, TypeError, SyntaxError):
            pass
        return getattr(self.when, "__qualname__", "when=")


@overload
def on_server(method: Callable[Concatenate[Any, State, P], R], /) -> ServerMethod[P, R]: ...
@overload
def on_server(
    *, when: Guard | None = None, atomic: bool = True, reads: bool = False
) -> Callable[[Callable[Concatenate[Any, State, P], R]], ServerMethod[P, R]]: ...
def on_server(method: Any = None, /, *, when: Guard | None = None, atomic: bool = True, reads: bool = False) -> Any:
    """Mark a plain method as the server's. It receives the server's state after self; one call runs at a time.

    `when(self, s, *args)` is a pure guard: the call waits until it is true. `atomic=False` runs the call without a
    lock, in pieces that interleave with other workers' calls (HogWild). `reads=True` promises that the method changes
    nothing: in shared memory a worker then reads for itself and wakes no server (with a guard: the server says when).
    """
    if method is not None:
        return ServerMethod(method, when, atomic)
    return lambda function: ServerMethod(function, when, atomic, reads)


class Scheme:
    """A synchronisation scheme. Subclasses are frozen dataclasses: `class Mine(Scheme, name="mine")`.

    The default name is that of the file. A scheme without an `@on_server` method has no server: its centre is the
    state of the chief (worker 0).
    """

    name: ClassVar[str] = ""
    asynchronous: ClassVar[bool] = False  # the centre may change while a worker computes
    fixed_order: ClassVar[bool] = False  # an update adds all workers' gradients in the order of ranks
    alone: ClassVar[bool] = False  # takes one worker only
    # without a server: every worker has a model of its own. An update is one step of every living worker, and what is
    # evaluated and saved is the mean of their models
    decentralised: ClassVar[bool] = False
    rule_at_server: ClassVar[bool] = False  # `rule` is the server's: `server.rule` means the same
    fair: ClassVar[bool] = False  # asynchronous, and yet all workers count alike, whatever their speeds
    # whether updates wait for every living worker; None: "never" if asynchronous, else "always"
    waits: ClassVar[Literal["always", "sometimes", "never"] | None] = None
    reads_in_place: ClassVar[bool] = False  # a worker's x only ever is what it has read without a lock
    uncut: ClassVar[frozenset[str]] = frozenset()  # server cells that are not sharded, though they are as long as x
    # what it sends that may be compressed: "mean", or "push.g" for the argument g of push, "push.g[p]" if g is the
    # fragment p: steps (gradients, differences of parameters), not points, as a compressor would damage parameters.
    # "meet": models that workers give each other, by compressors that say they are precise enough
    compresses: ClassVar[tuple[str, ...]] = ()
    compression: ClassVar[str] = ""  # the compressor of its paper, unless the run has another
    retired: ClassVar[dict[str, str]] = {}  # switches of earlier versions, all off now -> what to give instead
    # for the catalogue: `paceline list schemes`, `paceline show` and docs/schemes.md
    family: ClassVar[str] = "others"  # one of config.listing.SCHEME_FAMILIES
    good_for: ClassVar[str] = ""  # when to choose it, as a sentence
    volume: ClassVar[str] = ""  # vectors that a worker sends and receives per gradient: a formula of fields and workers
    limit: ClassVar[str] = ""  # the stability limit on a quadratic of curvature h
    equals: ClassVar[str] = ""  # identities: "window=1 is async; workers=1 is sgd"
    methods: ClassVar[dict[str, ServerMethod[Any, Any]]] = {}
    parameters: Named = ()  # names and shapes of the parameters, in the order of the vector, once they are known
    _scheduled: tuple[str, ...] = ()  # the fields that follow a schedule, or have an option that does
    _now: tuple[int, Scheme] | None = None  # a version, and the scheme at that version
    compressor: Compressor | None = None  # of this run
    _source: Scheme | None = None  # of a scheme at a version: the one that follows schedules

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name or _file_name(cls)
        cls.methods = {key: value for key in dir(cls) if isinstance(value := getattr(cls, key, None), ServerMethod)}
        for key, function in vars(cls).items():
            if inspect.iscoroutinefunction(function):
                _refuse_augmented_await(f"{cls.__name__}.{key}", function)

    def __post_init__(self) -> None:
        for field, hint in fields(type(self)):
            value = converted(self.name, field.name, getattr(self, field.name), hint)
            object.__setattr__(self, field.name, value)
            if isinstance(value, float) and math.isnan(value):
                raise UsageError(f"{self.name}: {field.name} must be a number, not {value:g}")
            if isinstance(value, Schedule) or (isinstance(value, Component) and value.scheduled()):
                object.__setattr__(self, "_scheduled", (*self._scheduled, field.name))

    @property
    def source(self) -> Self:
        """The scheme with its schedules, of one at a version."""
        return self if self._source is None else self._source  # type: ignore[return-value]

    def rates_at(self, state: State) -> Self:
        """This scheme with the rates of the version that a state has: numbers in place of schedules. Methods of the
        server, and a step as it begins, are called on it; a step that has pulled another version asks once more."""
        source = self if self._source is None else self._source
        if not source._scheduled:
            return self
        v = state.v
        if source._now is None or source._now[0] != v:
            now = copy.copy(source)
            for name in source._scheduled:
                value = getattr(source, name)
                object.__setattr__(now, name, value.at(v))
            object.__setattr__(now, "_scheduled", ())
            object.__setattr__(now, "_source", source)
            object.__setattr__(source, "_now", (v, now))
        assert source._now is not None
        found: Self = source._now[1]  # type: ignore[assignment]
        return found

    def fitted(self, parameters: Iterable[tuple[str, Sequence[int]]]) -> Self:
        """This scheme for a vector of parameters with these names and shapes: some rules keep other state of a matrix
        than of a vector. A vector without any is one parameter."""
        named = tuple((name, tuple(shape)) for name, shape in parameters)
        shapes = tuple(shape for _, shape in named)
        rules = {field.name: getattr(self, field.name) for field, _ in fields(type(self))}
        fitted: dict[str, Any] = {name: rule.fitted(shapes) for name, rule in rules.items() if isinstance(rule, Rule)}
        if self.compressor is not None and self.compressor.shapes != shapes:
            fitted["compressor"] = self.compressor.fitted(shapes)
        if named == self.parameters and all(fitted[name] is rules.get(name) for name in fitted):
            return self
        other = copy.copy(self)
        object.__setattr__(other, "parameters", named)
        object.__setattr__(other, "_now", None)
        for name, rule in fitted.items():
            object.__setattr__(other, name, rule)
        return other

    def server(self, x0: Vector, workers: int) -> State:
        """The server's state at the start."""
        return State(x=x0)

    def worker(self, x0: Vector, workers: int) -> State:
        """A worker's state at the start; it survives a crash of the worker."""
        return State(x=x0)

    def compressed(self, compressor: Compressor | None) -> Self:
        """This scheme with a compressor for what it sends."""
        if compressor is self.compressor:
            return self
        other = copy.copy(self.source)
        object.__setattr__(other, "compressor", compressor)
        object.__setattr__(other, "_now", None)
        return other

    def sends_messages(self) -> bool:
        """Whether its step uses `w.send` and `w.receive`: then every worker has cells for messages under way."""
        return False

    def worker_state(self, x0: Vector, workers: int) -> State:
        """A worker's state at the start, with the cells of messages and of the compressor."""
        state = self.worker(x0, workers)
        sites = self.compressed_sites(len(x0))
        cells: dict[str, Cell] = {name: state.cell(name) for name in state}
        if self.sends_messages():
            cells |= message_cells(x0, workers)
        if self.compressor is not None and sites is not None:
            cells |= {COMPRESSED_SHAPES: self.compressor.shapes_cell()} | sites.cells(x0, workers)
        return state if len(cells) == len(list(state)) else State(**cells)

    def fragments_of(self, length: int) -> Sequence[Fragment]:
        """The fragments of a vector that it sends by themselves; none: it sends whole vectors."""
        return ()

    def compressed_sites(self, length: int) -> CompressedSites | None:
        """What it sends that is compressed, of vectors of this length; None without a compressor."""
        if self.compressor is None:
            return None
        names = [name for name in self.compresses if name != SEND or self.sends_messages()]
        return CompressedSites(self.compressor, names, self.fragments_of(length))

    def own_cells(self, length: int) -> frozenset[str]:
        """Cells that a worker keeps when it takes over another's: what it has not sent yet is its own."""
        sites, messages = self.compressed_sites(length), MESSAGE_CELLS if self.sends_messages() else ()
        return (frozenset() if sites is None else sites.own_cells()) | frozenset(messages)

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        """The mean of what workers have sent, in the order given; signsgd makes it their majority."""
        mean = mean_of(vectors)
        return mean if self.compressor is None else self.compressor.combined(mean)

    async def step(self, w: Worker) -> None:
        """One iteration of a worker. The session owns the loop, so a step is the unit of recovery."""
        raise SchemeError(f"{type(self).__name__} has no step()")

    def model(self, s: State) -> Vector:
        """The parameters that are evaluated and saved."""
        x: Vector = s.x
        return x

    def left(self, s: State, rank: int) -> None:
        """A worker has left: a barrier lowers its quorum here."""

    def joined(self, s: State, rank: int) -> None:
        """A worker has joined again."""

    def holder(self, rank: int) -> int:
        """The owner of the copy of the centre that the worker uses: the worker, or its group."""
        return rank

    def donors(self, rank: int, workers: int) -> Sequence[int]:
        """Without a server: the workers in the order in which one is chosen whose state a restarted worker continues
        with. In processes it is a worker that waits for a mean with it, and none that is steps ahead of one before it
        in this order."""
        return range(workers)

    def mean_groups(self, rank: int, workers: int) -> Sequence[Sequence[int]]:
        """Without a server: the groups among which this worker comes to means, the smallest first, without that of all
        workers. A worker that is restarted may join at the mean of each."""
        return ()

    def whole(self) -> str | None:
        """Why the vector cannot be sharded over several servers, or None: a method may need all of it at once."""
        return None

    def indivisible(self) -> str | None:
        """Why the vector cannot be sharded: what `whole` says, or that the server's rule needs whole parameters."""
        rule = getattr(self, "server_rule", getattr(self, "rule", None) if self.rule_at_server else None)
        return self.whole() or (rule.whole() if isinstance(rule, Rule) else None)

    def exact(self, workers: int) -> str | None:
        """Why this number of workers would not give the same bits each time, or None if it does: then every update is
        made of all workers' gradients in the order of ranks, and where there is a server each step is one update."""
        if self.fixed_order:
            return None
        if self.asynchronous:
            return "its updates have no fixed order; record the run and use `paceline replay` instead"
        return "it does not say that its order is fixed: set fixed_order = True in its class if it is"

    def check(self, workers: int) -> None:
        """Raise UsageError if the hyper-parameters cannot work with this number of workers."""

    def gradients_per_update(self, workers: int) -> float | None:
        """The number of gradients that enter one update, on average; None if it depends on the training. It converts
        samples and epochs to updates."""
        return None

    def exchanged(self, s: State, gradients: Vector) -> Vector | None:
        """What workers do to the server that push these gradients (a row each) in turn and pull after it, at once: x
        and v change as by those calls, and x after each is given, a row each. Gives None, and changes nothing, where
        the rule knows no short way. For schemes whose step is: pull x and v; a gradient there; push it with v, each
        push changes x once. `simulate --batched` uses it. A class that changes the step has to define it again."""
        return None

    def updates_at_start(self, workers: int) -> int:
        """The number of updates that workers make at their first step, before the gradients that the others take."""
        return 0

    def vectors_per_gradient(self, workers: int) -> float:
        """The value of the formula `volume`: vectors as long as x that cross the network, both ways."""
        values = {field.name: getattr(self, field.name) for field, _ in fields(type(self))}
        return evaluated(self.volume, values | {"workers": workers})

    def gain(self, workers: int, curvature: float) -> Gain | None:
        """How far one update goes on a quadratic, for the stability warnings; None if the rules tell no limit."""
        rule, lr = getattr(self, "rule", None), getattr(self, "lr", 0.0)
        return Gain(rule.rate(lr) * curvature) if type(rule) is SGD else None

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        """Stability limits that these values cross, as sentences; `curvature` is None if the task does not know it.
        Most schemes choose `stability.synchronous` or `stability.asynchronous` here."""
        yield from ()


_FIELDS: WeakKeyDictionary[type, tuple[tuple[dataclasses.Field[Any], Any], ...]] = WeakKeyDictionary()


def fields(scheme: type[Scheme]) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """The hyper-parameters with their types; refuses a class that is not a frozen dataclass."""
    parameters = getattr(scheme, "__dataclass_params__", None)
    if "__dataclass_params__" not in vars(scheme) or parameters is None or not parameters.frozen:
        raise SchemeError(f"{scheme.__qualname__} must be a frozen dataclass: put @dataclass(frozen=True) above it")
    found = _FIELDS.get(scheme)
    if found is None:  # evaluating annotations takes a millisecond
        hints = get_type_hints(scheme, include_extras=True)
        found = tuple((field, hints[field.name]) for field in dataclasses.fields(scheme))  # type: ignore[arg-type]
        _FIELDS[scheme] = found
    return found


def _file_name(cls: type) -> str:
    module = inspect.getmodule(cls)
    file = getattr(module, "__file__", None)
    stem = Path(file).stem if file else cls.__name__.lower()
    return stem.rstrip("_").replace("_", "-")


def _refuse_augmented_await(where: str, function: Callable[..., Any]) -> None:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return  # no source at hand (an interactive prompt): nothing to read
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and any(isinstance(n, ast.Await) for n in ast.walk(node.value)):
            target, line = ast.unparse(node.target), first + node.lineno - 1
            raise SchemeError(
                f"{where}, line {line}: '{ast.unparse(node)}' reads {target} before the wait; "
                f"write 'd = await …' first, then change {target} by d"
            )
