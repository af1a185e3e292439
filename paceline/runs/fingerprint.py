"""The fingerprint of a run: the settings, data and software versions that determine its result, and their hash.

runs/NAME/fingerprint.json holds an entry for every launch that differs from the one before.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch

from paceline import __version__
from paceline.config import discovery
from paceline.config.options import without_effect
from paceline.config.plan import Plan
from paceline.errors import DataError
from paceline.fields import Component, converted
from paceline.hook import Hook
from paceline.runs import atomic_files, file_sums
from paceline.runs.data_digest import data_of
from paceline.scheme import Scheme
from paceline.scheme import fields as fields_of_scheme
from paceline.state import Vector
from paceline.task import Task

FILE = "fingerprint.json"
OF_A_SCRIPT = "the data are the script's own: paceline does not see them"

KEEPERS = {"checkpoint-saver", "summary-saver"}  # hooks that change no bit of the result
LENGTH = ("steps", "seconds")  # settings that only say when a launch ends


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one launch. `before`: the launch that it resumed from, if that one had other settings."""

    config: dict[str, Any]
    data: dict[str, Any] | None
    versions: dict[str, Any]
    reason: str | None = None  # why the data are not known
    objects: tuple[str, ...] = ()  # what was given as a Python object, which a plan cannot name
    before: dict[str, Any] | None = None
    launched_at: tuple[int, ...] = (0,)  # the update at which each launch with these settings began

    @property
    def hash(self) -> str:
        parts: dict[str, Any] = {"config": self.config, "data": self.data, "versions": self.versions}
        if self.before is not None:
            parts["before"] = self.before
        return hashlib.sha256(canonical(parts)).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = _plain(asdict(self))
        return {"fingerprint": self.hash} | plain


@dataclass(frozen=True)
class Recorded:
    """An entry of fingerprint.json, and the hash that was written with it."""

    fingerprint: Fingerprint
    hash: str


def canonical(parts: Mapping[str, Any]) -> bytes:
    """Canonical JSON: the same content gives the same bytes."""
    return json.dumps(_plain(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def of(plan: Plan, scheme: Scheme | None, task: Task | None, x0: Vector | None, hooks: Sequence[Hook]) -> Fingerprint:
    """The fingerprint of a launch. `hooks`: those given as objects; `scheme`: None if a script has yet to choose it."""
    given = {
        "task": task is not None and plan.task is None,
        "scheme": scheme is not None and plan.scheme is None,
        "hooks": any(one.name not in KEEPERS for one in hooks),
    }
    objects = tuple(name for name, unnamed in given.items() if unnamed)
    data, reason = (None, OF_A_SCRIPT) if task is None else data_of(task, x0)
    return Fingerprint(config_of(plan, scheme, task, hooks), data, versions(plan.threads, plan.device), reason, objects)


def config_of(plan: Plan, scheme: Scheme | None, task: Task | None, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """The settings that have an effect on the result, including defaults."""
    settings = {name: value for name, value in asdict(plan).items() if name not in without_effect(Plan)}
    if scheme is not None and scheme.compressor is None:
        del settings["compress"]  # runs of earlier versions had no such setting
    if not plan.inside:
        del settings["inside"]
    named = [one for one in plan.hooks if one.partition(":")[0] not in KEEPERS]
    settings["hooks"] = named + [_described(one) for one in hooks if one.name not in KEEPERS]
    settings["script"] = [Path(plan.script[0]).name, *plan.script[1:]] if plan.script else []
    if plan.script:  # the other settings are in the script
        settings["script_sha256"] = None
        with suppress(OSError):  # a notebook, or deleted since
            settings["script_sha256"] = atomic_files.sha256(Path(plan.script[0]))
    if scheme is not None:
        settings |= {"scheme": scheme.name, "hyper": _hyper(scheme)}
        if scheme.compressor is not None:
            settings["compress"] = str(scheme.compressor)
    if task is not None:
        settings |= {"task": plan.task or task.name, "task_options": _options(plan)}
        settings |= {"batch": task.batch, "feed": task.feed, "shuffle": task.shuffle}
    plain: dict[str, Any] = _plain(settings)
    return plain


def versions(threads: int, device: str) -> dict[str, Any]:
    """The versions of everything that computes: the same settings can give other bits with other versions."""
    found: dict[str, Any] = {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": threads,
    }
    if device != "cpu":
        found |= {"cuda": torch.version.cuda, "gpu": _graphics()}
    return found


def write(
    directory: Path, launch: Fingerprint, update: int, say: Callable[[str], None] = lambda _: None
) -> Fingerprint:
    """Add a launch that starts at this update to the earlier ones."""
    try:
        earlier = [one.fingerprint for one in read(directory)] if update else []
    except DataError as error:  # no reason not to train
        earlier = []
        say(f"{error}; what determined the earlier launches is not known any more")
    if earlier:
        last = earlier[-1]
        begun = {"fingerprint": last.hash, "update": update}
        launch = replace(launch, before=last.before if _same_way(last, launch) else begun)
        if launch.hash == last.hash:
            earlier.pop()
            launch = replace(launch, launched_at=(*last.launched_at, update))
        else:
            launch = replace(launch, launched_at=(update,))
    elif update:  # the earlier launches are not known
        launch = replace(launch, before={"fingerprint": None, "update": update}, launched_at=(update,))
    file_sums.write_json(directory, FILE, {"launches": [one.as_dict() for one in (*earlier, launch)]})
    return launch


def read(directory: Path, *, checked: bool = True) -> list[Recorded]:
    """The launches of a run, oldest first; empty for a run of a version that did not record them."""
    if not (directory / FILE).exists():
        return []
    if checked:
        file_sums.check(directory, FILE)
    launches = atomic_files.read_json(directory / FILE).get("launches")
    try:
        if not launches:
            raise ValueError("it holds no launch")
        return [_recorded(entry) for entry in launches]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{FILE} is not what was written: {error}") from error


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    noted: dict[str, Any] = {one.name: entry[one.name] for one in fields(Fingerprint)}
    for name in ("config", "versions"):
        if not isinstance(noted[name], dict):
            raise ValueError(f"its {name} is a {type(noted[name]).__name__}")
    noted |= {name: tuple(noted[name]) for name in ("objects", "launched_at")}
    return Recorded(Fingerprint(**noted), str(entry["fingerprint"]))


def last_of(directory: Path) -> str | None:
    """The fingerprint of a run's newest launch."""
    try:
        launches = read(directory)
    except DataError:
        return None
    return launches[-1].hash if launches else None


def differing(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values; nested tables give `outer.inner`."""
    a, b = _flat(a or {}), _flat(b or {})
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _same_way(last: Fingerprint, launch: Fingerprint) -> bool:
    """Whether a launch continues with what determined the last one."""
    settings = [{k: v for k, v in one.config.items() if k not in LENGTH} for one in (last, launch)]
    return settings[0] == settings[1] and (last.data, last.versions) == (launch.data, launch.versions)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _hyper(scheme: Scheme) -> dict[str, Any]:
    """Every hyper-parameter, and every option of a rule, including defaults."""
    found: dict[str, Any] = {}
    for field, _ in fields_of_scheme(type(scheme)):
        value = getattr(scheme, field.name)
        found[field.name] = value
        if isinstance(value, Component):
            found[field.name] = {"name": value.name} | {one.name: getattr(value, one.name) for one in fields(value)}
    return found


def _options(plan: Plan) -> dict[str, Any]:
    """The task's options with its defaults, in their own types: the words of a command equal Python's values.

    The path of the data is omitted: their content is hashed.
    """
    made = discovery.task(plan.task) if plan.task else None
    if isinstance(made, Task) or not callable(made):
        return plan.task_options
    hints, parameters = get_type_hints(made), inspect.signature(made).parameters
    options = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    for name, value in plan.task_options.items():
        options[name] = converted(f"task {plan.task}", name, value, hints.get(name, Any))
    options.pop("data", None)
    return options


def _described(hook: Hook) -> str:
    """A hook that was made in Python: its class and those of its options that are plain values."""
    options: dict[str, Any] = {}
    if is_dataclass(hook):
        options = {one.name: getattr(hook, one.name) for one in fields(hook)}
    shown = [f"{name}={value}" for name, value in options.items() if isinstance(value, str | int | float | None)]
    return f"{type(hook).__qualname__}({', '.join(shown)})"


def _graphics() -> list[str] | None:
    """The graphics cards by the driver's names: torch would start CUDA, after which no process may fork."""
    try:
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    except OSError:
        return None
    return sorted(line.partition(":")[2].strip() for line in lines) or None


def _plain(value: Any) -> Any:
    """Data that JSON gives back equal. NaN and infinity become words, because null would make them equal."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
