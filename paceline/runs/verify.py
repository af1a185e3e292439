"""Whether what a run left behind fits together: `verify` reads it all again and computes what can be computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import build
from paceline.config.plan import Plan
from paceline.errors import DataError, PacelineError
from paceline.result import digest
from paceline.runs import checkpoint, file_sums, fingerprint, order_log
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.data_digest import data_of
from paceline.runs.fingerprint import Fingerprint, Recorded, differing
from paceline.runs.order_history import read
from paceline.runs.run_directory import RunDirectory
from paceline.runs.trained_model import task_of
from paceline.scheme import Scheme
from paceline.task import Task

SETTINGS = ("scheme", "workers", "servers", "seed", "batch")  # that a result repeats


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `fits` is None where it cannot be told, which the text explains."""

    what: str
    fits: bool | None
    text: str


@dataclass(frozen=True)
class Verification:
    """What was found. `versions`: those that are not what they were, as (then, now); they are no fault of the run."""

    run: str
    checks: tuple[Check, ...]
    versions: dict[str, tuple[Any, Any]]

    @property
    def verified(self) -> bool:
        return all(check.fits is not False for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"verified": self.verified} | asdict(self)


def verify(run: str | Path, *, task: Task | None = None) -> Verification:
    """Read a run directory again and say whether it fits together.

    The digest is computed from the newest checkpoint's model, the settings are those of plan.json, the data those
    that the task has now; the versions are taken as they were noted. `task`: for a run of a task made in Python.
    """
    directory = RunDirectory.open(run)
    result, checks = _result(directory)
    checks += _files(directory, result)
    checks += _history(directory)
    checks += _order(directory)
    found, about_checkpoints = _checkpoints(directory)
    checks += about_checkpoints
    if result is not None:
        checks += _digest(result, found)
    try:
        launches = fingerprint.read(directory.path, checked=False)
    except DataError as error:
        return Verification(directory.name, (*checks, Check("fingerprint", False, str(error))), {})
    if not launches:
        missing = Check("fingerprint", None, "none was noted: the run is of an earlier version")
        return Verification(directory.name, (*checks, missing), {})
    checks += _settings_and_data(directory, launches[-1].fingerprint, result, task)
    checks += _fingerprint(launches, result)
    noted = launches[-1].fingerprint
    now = fingerprint.versions(noted.config.get("threads", 1), noted.config.get("device", "cpu"))
    return Verification(directory.name, tuple(checks), differing(noted.versions, now))


def _result(directory: RunDirectory) -> tuple[dict[str, Any] | None, list[Check]]:
    if directory.is_locked():
        return None, [Check("result", False, "the run is still going on: wait for its end")]
    try:
        result = directory.result(checked=False)
    except DataError as error:
        return None, [Check("result", False, _within(error, directory))]
    if result is None:
        return None, [Check("result", False, "there is no result.json: the run was broken off; go on with --resume")]
    if result.get("error"):
        return result, [Check("result", False, f"the run failed: {result['error']}")]
    updates = result.get("updates")
    shown = f"{updates:,} updates" if isinstance(updates, int) else "result.json has no updates"
    stopped = f", {result['stopped']}" if result.get("stopped") else ""
    return result, [Check("result", isinstance(updates, int), shown + stopped)]


def _files(directory: RunDirectory, result: dict[str, Any] | None) -> Iterator[Check]:
    """Every file beside the sum that was noted when the run ended."""
    try:
        sums = file_sums.read(directory.path)
        changed = file_sums.changed(directory.path)
    except DataError as error:
        yield Check("files", False, _within(error, directory))
        return
    if sums is None:
        noted = (directory.path / fingerprint.FILE).exists()  # a version that notes this notes sums too
        text = f"there is no {file_sums.FILE}" + ("" if noted else ": the run is of an earlier version")
        yield Check("files", False if noted and result is not None else None, text)
    elif changed:
        yield Check("files", False, "; ".join(changed))
    elif sums.ended:
        yield Check("files", True, f"{len(sums.files)} have the sums that were noted")
    else:
        yield Check("files", None, "the run has not ended in order: only those of its start have sums")


def _history(directory: RunDirectory) -> Iterator[Check]:
    bad: list[str] = []
    try:
        lines = directory.history(bad.append)
    except DataError as error:
        bad = [_within(error, directory)]
    if bad:
        yield Check("history", False, "; ".join(bad))
    elif lines:
        yield Check("history", True, f"{len(lines)} lines read")


def _order(directory: RunDirectory) -> Iterator[Check]:
    """Every order log, and every checkpoint that lies beside them."""
    launches, saved = order_log.launches(directory.path), 0
    for at in launches:
        try:
            launch = read(at)
            kept = sorted(path for path in at.iterdir() if path.is_dir())
            if launch.about["resumed"] and at / order_log.START not in kept:
                raise DataError(f"{at / order_log.START}, which the launch went on from, is missing")
            for path in kept:
                checkpoint.load(path)
            saved += len(kept)
        except DataError as error:
            yield Check("order", False, _within(error, directory))
            return
    if launches:
        with_saved = f", and {saved} checkpoints beside them" if saved else ""
        yield Check("order", True, f"the logs of {len(launches)} launches read{with_saved}")


def _checkpoints(directory: RunDirectory) -> tuple[Checkpoint | None, list[Check]]:
    """Every one is read whole. Gives the newest that can be."""
    newest, whole, damaged = None, 0, []
    for path in [*checkpoint.folders(directory.path / "best"), *checkpoint.folders(directory.checkpoints)]:
        try:
            one = checkpoint.load(path)
        except DataError as error:
            damaged.append(Check("checkpoint", False, _within(error, directory)))
            continue
        whole += 1
        newest = one if path.parent == directory.checkpoints else newest
    checkpoint.best(directory.path, lambda text: damaged.append(Check("best", False, text)))
    if not whole and not damaged:
        return None, [Check("checkpoints", False, "there are none")]
    sums = Check("checkpoints", True, f"{whole} read, the sums are those that were written")
    return newest, damaged + ([sums] if whole else [])


def _digest(result: dict[str, Any], found: Checkpoint | None) -> list[Check]:
    told = result.get("digest")
    if found is None or "model" not in found.tensors:
        return [Check("digest", False, "no checkpoint is whole: there is nothing to compute it from")]
    if not isinstance(told, str):
        return [Check("digest", False, "result.json has none")]
    where, computed = f"of the checkpoint of update {found.step:,}", digest(found.tensors["model"])
    if computed != told:
        text = f"{computed[:16]}… {where}; result.json has {told[:16]}…"
        if isinstance(result.get("updates"), int) and result["updates"] != found.step:
            text += f" of update {result['updates']:,}"
        return [Check("digest", False, text)]
    return [Check("digest", True, f"{computed[:16]}… {where}")]


def _settings_and_data(
    directory: RunDirectory, noted: Fingerprint, result: dict[str, Any] | None, given: Task | None
) -> Iterator[Check]:
    """The settings that plan.json gives today and the data that its task has, beside those that were noted."""
    try:
        plan = Plan.from_dict(directory.plan(checked=False))
        scheme = None if plan.scheme is None else build.scheme_of(plan.scheme, plan.hyper)
    except (PacelineError, TypeError) as error:
        yield Check("config", False, _within(error, directory))
        return
    task, obstacle = _task(directory, plan, given)
    yield _config(plan, scheme, task, noted, result or {})
    if noted.data is None:
        yield Check("data", None, noted.reason or "not known")
    elif task is None:
        yield Check("data", obstacle.fits, obstacle.text)
    else:
        data, reason = data_of(task, task.start(plan.seed))
        parted = differing(noted.data, data)
        named = ", ".join("the first vector" if name == "start" else name for name in parted)
        text = reason or (f"other data than then: {named}" if parted else "the same as then")
        yield Check("data", not parted, text)


def _task(directory: RunDirectory, plan: Plan, given: Task | None) -> tuple[Task | None, Check]:
    """The run's task made again, or why it cannot be: None fits where it was never to be expected."""
    if plan.script:
        return None, Check("data", None, fingerprint.OF_A_SCRIPT)
    if plan.task is None and given is None:
        return None, Check("data", None, "taken as noted: the task was made in Python; give verify(run, task=…)")
    try:
        return task_of(directory, given, checked=False), Check("data", True, "")
    except Exception as error:  # of a task's own code, too
        return None, Check("data", False, f"the task cannot be made again: {error}")


def _config(plan: Plan, scheme: Scheme | None, task: Task | None, noted: Fingerprint, result: dict[str, Any]) -> Check:
    try:
        present = fingerprint.config_of(plan, scheme, task)
    except PacelineError as error:
        return Check("config", False, str(error))
    unnamed = set(noted.objects) | ({"scheme", "hyper"} if "scheme" in noted.objects else set())
    if task is None:  # what only the task itself can tell
        unnamed |= {"task_options"} | {one for one in ("batch", "feed", "shuffle") if getattr(plan, one) is None}
        unnamed |= {"task"} if plan.task is None else set()
    if present.get("script_sha256") is None:  # the script has gone, or lies elsewhere
        unnamed |= {"script_sha256"}
    present |= {key: noted.config[key] for key in unnamed if key in noted.config}
    retired = () if scheme is None else scheme.retired
    noted_config = noted.config | {
        "hyper": {key: value for key, value in (noted.config.get("hyper") or {}).items() if key not in retired}
    }
    defaults = asdict(Plan())
    for key in present.keys() - noted.config.keys():  # a setting of a later version than the run's: it had no say
        if present[key] == defaults.get(key):
            del present[key]
    found = [
        f"{key} is {_shown(now)}, was {_shown(then)}" for key, (then, now) in differing(noted_config, present).items()
    ]
    if found:
        return Check("config", False, "plan.json is not what was run: " + "; ".join(found))
    run = noted.config | {"workers": plan.hosts}  # people count processes
    told = {key: result[key] for key in SETTINGS if key in result and not plan.script}
    wrong = [f"{key} {_shown(told[key])}, not {_shown(run[key])}" for key in told if told[key] != run[key]]
    if wrong:
        return Check("config", False, "result.json has " + "; ".join(wrong))
    text = f"plan.json gives the {len(noted.config)} settings that were noted"
    if taken := sorted(key for key in unnamed if noted.config.get(key) not in (None, {}, [])):
        text += f" (taken as noted: {', '.join(taken)})"
    return Check("config", True, text)


def _fingerprint(launches: list[Recorded], result: dict[str, Any] | None) -> Iterator[Check]:
    before = None
    for number, one in enumerate(launches, 1):
        named = one.fingerprint.before
        if one.fingerprint.hash != one.hash:
            text = f"{fingerprint.FILE} was changed: the hash of launch {number} is not that of its parts"
            yield Check("fingerprint", False, text)
            return
        if before and named and named["fingerprint"] not in before:
            text = f"{fingerprint.FILE} was changed: launch {number} went on from one that is not there"
            yield Check("fingerprint", False, text)
            return
        before = {*(before or ()), one.hash}
    last, told = launches[-1].hash, (result or {}).get("fingerprint")
    if told is not None and told != last:
        yield Check("fingerprint", False, f"result.json has {str(told)[:16]}…, {fingerprint.FILE} {last[:16]}…")
    else:
        launched = sum(len(one.fingerprint.launched_at) for one in launches)
        yield Check("fingerprint", True, f"{last[:16]}…" + (f" of {launched} launches" if launched > 1 else ""))


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _within(error: Exception, directory: RunDirectory) -> str:
    """What went wrong, without the way to a directory that the reader has just named."""
    return str(error).replace(f"run {directory.path}: ", "").replace(f"{directory.path}/", "")
