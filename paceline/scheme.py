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
    ParamSpec,
    Self,
    TypeVar,
    get_type_hints,
    overload,
)

from paceline.errors import SchemeError, UsageError
from paceline.fields import Bound, Component, Count, Fraction, Rate, converted
from paceline.ops import Call
from paceline.rules import SGD, Rule
from paceline.schedules import Schedule
from paceline.stability import Gain
from paceline.state import State, Vector, mean_of, sum_of

if TYPE_CHECKING:
    from paceline.worker import Worker

__all__ = ["Bound", "Count", "Fraction", "Rate", "Scheme", "State", "Vector", "mean_of", "on_server", "sum_of"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Guard = Callable[..., bool]


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
    rule_at_server: ClassVar[bool] = False  # `rule` is the server's: `server.rule` means the same
    reads_in_place: ClassVar[bool] = False  # a worker's x only ever is what it has read without a lock
    uncut: ClassVar[frozenset[str]] = frozenset()  # server cells that are not sharded, though they are as long as x
    retired: ClassVar[dict[str, str]] = {}  # switches of earlier versions, all off now -> what to give instead
    methods: ClassVar[dict[str, ServerMethod[Any, Any]]] = {}
    _scheduled: tuple[str, ...] = ()  # the fields that follow a schedule, or have an option that does
    _now: tuple[int, Scheme] | None = None  # a version, and the scheme at that version
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
        source = self.source
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
        shapes = tuple(tuple(shape) for _, shape in parameters)
        rules = {field.name: getattr(self, field.name) for field, _ in fields(type(self))}
        fitted = {name: rule.fitted(shapes) for name, rule in rules.items() if isinstance(rule, Rule)}
        if all(fitted[name] is rules[name] for name in fitted):
            return self
        other = copy.copy(self)
        for name, rule in fitted.items():
            object.__setattr__(other, name, rule)
        return other

    def server(self, x0: Vector, workers: int) -> State:
        """The server's state at the start."""
        return State(x=x0)

    def worker(self, x0: Vector, workers: int) -> State:
        """A worker's state at the start; it survives a crash of the worker."""
        return State(x=x0)

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

    def gain(self, workers: int, curvature: float) -> Gain | None:
        """How far one update goes on a quadratic, for the stability warnings; None if the rules tell no limit."""
        rule, lr = getattr(self, "rule", None), getattr(self, "lr", 0.0)
        return Gain(rule.rate(lr) * curvature) if type(rule) is SGD else None

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        """Stability limits that these values cross, as sentences; `curvature` is None if the task does not know it.
        Most schemes choose `stability.synchronous` or `stability.asynchronous` here."""
        yield from ()


def fields(scheme: type[Scheme]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The hyper-parameters with their types; refuses a class that is not a frozen dataclass."""
    parameters = getattr(scheme, "__dataclass_params__", None)
    if "__dataclass_params__" not in vars(scheme) or parameters is None or not parameters.frozen:
        raise SchemeError(f"{scheme.__qualname__} must be a frozen dataclass: put @dataclass(frozen=True) above it")
    hints = get_type_hints(scheme, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(scheme)]  # type: ignore[arg-type]


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
