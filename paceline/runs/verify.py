"""`verify` reads all files of a run again and checks that they fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import from_plan
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

SETTINGS = ("scheme", "workers", "servers", "seed", "batch")  # settings that a result repeats


@dataclass(frozen=True)
class Check:
    """One check. `fits` is None if it cannot be decided; the text says why."""

    what: str
    fits: bool | None
    text: str


@dataclass(frozen=True)
class Verification:
    """The checks of a run. `versions`: those that have changed since, as (then, now); they are no fault of the run."""

    run: str
    checks: tuple[Check, ...]
    versions: dict[str, tuple[Any, Any]]

    @property
    def verified(self) -> bool:
        """Whether no check has failed; one that could not be made is no failure."""
        return all(check.fits is not False for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"verified": self.verified} | asdict(self)


def verify(run: str | Path, *, task: Task | None = None) -> Verification:
    """Read a run directory again and check that its files fit together.

    The digest is computed from the newest checkpoint's model, the settings are those of plan.json, the data those
    that the task has now; the versions are those that were recorded. `task`: for a run of a task made in Python.
    """
    directory = RunDirectory.open(run)
    result, checks = _result(directory)
    readings = {"files": _files(directory, result), "history": _history(directory), "order": _order(directory)}
    for what, found_by in readings.items():
        try:
            checks += found_by
        except DataError as error:
            checks.append(Check(what, False, _within(error, directory)))
    found, about_checkpoints = _checkpoints(directory)
    checks += about_checkpoints
    if result is not None:
        checks.append(_digest(result, found))
    try:
        launches = fingerprint.read(directory.path, checked=False)
    except DataError as error:
        return Verification(directory.name, (*checks, Check("fingerprint", False, str(error))), {})
    if not launches:
        missing = Check("fingerprint", None, "none was noted: the run is of an earlier version")
        return Verification(directory.name, (*checks, missing), {})
    checks += _settings_and_data(directory, launches[-1].fingerprint, result, task)
    checks.append(_fingerprint(launches, result))
    noted = launches[-1].fingerprint
    now = fingerprint.versions(noted.config.get("threads", 1), noted.config.get("device", "cpu"))
    return Verification(directory.name, tuple(checks), differing(noted.versions, now))


def _result(directory: RunDirectory) -> tuple[dict[str, Any] | None, list[Check]]:
    if directory.is_locked():
        return None, [Check("result", False, "the run is still running: wait for its end")]
    try:
        result = directory.result(checked=False)
    except DataError as error:
        return None, [Check("result", False, _within(error, directory))]
    if result is None:
        return None, [Check("result", False, "there is no result.json: the run was broken off; use --resume")]
    if result.get("error"):
        return result, [Check("result", False, f"the run failed: {result['error']}")]
    updates = result.get("updates")
    shown = f"{updates:,} updates" if isinstance(updates, int) else "result.json has no updates"
    stopped = f", {result['stopped']}" if result.get("stopped") else ""
    return result, [Check("result", isinstance(updates, int), shown + stopped)]


def _files(directory: RunDirectory, result: dict[str, Any] | None) -> Iterator[Check]:
    """Compare every file with the sum that was recorded when the run ended."""
    sums, changed = file_sums.read(directory.path), file_sums.changed(directory.path)
    if sums is None:
        noted = (directory.path / fingerprint.FILE).exists()  # versions that write this file write sums too
        text = f"there is no {file_sums.FILE}" + ("" if noted else ": the run is of an earlier version")
        yield Check("files", False if noted and result is not None else None, text)
    elif changed:
        yield Check("files", False, "; ".join(changed))
    elif sums.ended:
        yield Check("files", True, f"{len(sums.files)} have the sums that were noted")
    else:
        yield Check("files", None, "the run has not ended in order: only the files of its start have sums")


def _history(directory: RunDirectory) -> Iterator[Check]:
    bad: list[str] = []
    lines = directory.history(bad.append)
    if bad:
        yield Check("history", False, "; ".join(bad))
    elif lines:
        yield Check("history", True, f"{len(lines)} lines read")


def _order(directory: RunDirectory) -> Iterator[Check]:
    """Read every order log and every checkpoint beside them."""
    launches, saved = order_log.launches(directory.path), 0
    for at in launches:
        launch = read(at)
        kept = sorted(path for path in at.iterdir() if path.is_dir())
        if launch.about["resumed"] and at / order_log.START not in kept:
            raise DataError(f"{at / order_log.START}, which the launch resumed from, is missing")
        for path in kept:
            checkpoint.load(path)
        saved += len(kept)
    if launches:
        with_saved = f", and {saved} checkpoints beside them" if saved else ""
        yield Check("order", True, f"the logs of {len(launches)} launches read{with_saved}")


def _checkpoints(directory: RunDirectory) -> tuple[Checkpoint | None, list[Check]]:
    """Read every checkpoint; gives the newest whole one."""
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


def _digest(result: dict[str, Any], found: Checkpoint | None) -> Check:
    told = result.get("digest")
    if found is None or "model" not in found.tensors:
        return Check("digest", False, "no checkpoint is whole: there is nothing to compute it from")
    if not isinstance(told, str):
        return Check("digest", False, "result.json has none")
    where, computed = f"of the checkpoint of update {found.step:,}", digest(found.tensors["model"])
    if computed != told:
        text = f"{computed[:16]}… {where}; result.json has {told[:16]}…"
        if isinstance(result.get("updates"), int) and result["updates"] != found.step:
            text += f" of update {result['updates']:,}"
        return Check("digest", False, text)
    return Check("digest", True, f"{computed[:16]}… {where}")


def _settings_and_data(
    directory: RunDirectory, noted: Fingerprint, result: dict[str, Any] | None, given: Task | None
) -> Iterator[Check]:
    """Compare the settings that plan.json gives now, and the data that its task has now, with the recorded ones."""
    try:
        plan = Plan.from_dict(directory.plan(checked=False))
        scheme = None if plan.scheme is None else from_plan.scheme_of(plan, {})
    except (PacelineError, TypeError) as error:
        yield Check("config", False, _within(error, directory))
        return
    task = _task(directory, plan, given)
    yield _config(plan, scheme, None if isinstance(task, Check) else task, noted, result or {})
    if noted.data is None:
        yield Check("data", None, noted.reason or "not known")
    elif isinstance(task, Check):
        yield task
    else:
        data, reason = data_of(task, task.start(plan.seed))
        parted = differing(noted.data, data)
        named = ", ".join("the first vector" if name == "start" else name for name in parted)
        text = reason or (f"other data than then: {named}" if parted else "the same as then")
        yield Check("data", not parted, text)


def _task(directory: RunDirectory, plan: Plan, given: Task | None) -> Task | Check:
    """The run's task made again, or a check that says why it cannot be; `fits` is None if that was to be expected."""
    if plan.script:
        return Check("data", None, fingerprint.OF_A_SCRIPT)
    if plan.task is None and given is None:
        return Check("data", None, "not checked: the task was made in Python; give verify(run, task=…)")
    try:
        return task_of(directory, given, checked=False)
    except Exception as error:  # also of the task's own code
        return Check("data", False, f"the task cannot be made again: {error}")


def _config(plan: Plan, scheme: Scheme | None, task: Task | None, noted: Fingerprint, result: dict[str, Any]) -> Check:
    try:
        present = fingerprint.config_of(plan, scheme, task)
    except PacelineError as error:
        return Check("config", False, str(error))
    unnamed = set(noted.objects) | ({"scheme", "hyper"} if "scheme" in noted.objects else set())
    if task is None:  # settings that only the task knows
        unnamed |= {"task_options"} | {one for one in ("batch", "feed", "shuffle") if getattr(plan, one) is None}
        unnamed |= {"task"} if plan.task is None else set()
    if present.get("script_sha256") is None:  # the script was deleted or moved
        unnamed |= {"script_sha256"}
    present |= {key: noted.config[key] for key in unnamed if key in noted.config}
    retired = () if scheme is None else scheme.retired
    hyper = {key: value for key, value in (noted.config.get("hyper") or {}).items() if key not in retired}
    defaults = asdict(Plan())
    for key in present.keys() - noted.config.keys():  # a setting that the run's version did not have
        if present[key] == defaults.get(key):
            del present[key]
    parted = differing(noted.config | {"hyper": hyper}, present)
    if parted:
        shown = "; ".join(f"{key} is {_shown(now)}, was {_shown(then)}" for key, (then, now) in parted.items())
        return Check("config", False, f"plan.json is not what was run: {shown}")
    run = noted.config | {"workers": plan.hosts}  # a result counts processes
    told = {key: result[key] for key in SETTINGS if key in result and not plan.script}
    wrong = [f"{key} {_shown(told[key])}, not {_shown(run[key])}" for key in told if told[key] != run[key]]
    if wrong:
        return Check("config", False, "result.json has " + "; ".join(wrong))
    text = f"plan.json gives the {len(noted.config)} settings that were noted"
    if taken := sorted(key for key in unnamed if noted.config.get(key) not in (None, {}, [])):
        text += f" (not checked: {', '.join(taken)})"
    return Check("config", True, text)


def _fingerprint(launches: list[Recorded], result: dict[str, Any] | None) -> Check:
    before: set[str] = set()
    for number, one in enumerate(launches, 1):
        named, wrong = one.fingerprint.before, ""
        if one.fingerprint.hash != one.hash:
            wrong = f"the hash of launch {number} is not that of its parts"
        elif before and named and named["fingerprint"] not in before:
            wrong = f"launch {number} resumed from one that is missing"
        if wrong:
            return Check("fingerprint", False, f"{fingerprint.FILE} was changed: {wrong}")
        before.add(one.hash)
    last, told = launches[-1].hash, (result or {}).get("fingerprint")
    if told is not None and told != last:
        return Check("fingerprint", False, f"result.json has {str(told)[:16]}…, {fingerprint.FILE} {last[:16]}…")
    launched = sum(len(one.fingerprint.launched_at) for one in launches)
    return Check("fingerprint", True, f"{last[:16]}…" + (f" of {launched} launches" if launched > 1 else ""))


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _within(error: Exception, directory: RunDirectory) -> str:
    """The text of an error without the path of the directory, which the reader has just named."""
    return str(error).replace(f"run {directory.path}: ", "").replace(f"{directory.path}/", "")
