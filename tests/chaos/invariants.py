"""What must hold after any run, whatever has befallen its processes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

from launched import Ended
from processes import shared_files
from trials import Trial

from paceline import simulate, verify
from paceline.cli import main
from paceline.runs.replay.accounting import audit
from paceline.runs.run_directory import RunDirectory, RunState


def broken(trial: Trial, ended: Ended, shared_before: set[str]) -> list[str]:
    """The invariants that do not hold; each check reports its own errors."""
    found: list[str] = []
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: _end(trial, ended),
        lambda: _nothing_left(ended, shared_before),
    ]
    if ended.code is not None and (ended.place / "plan.json").exists():
        checks.append(lambda: _commands(ended))
        if _trained(ended):
            checks.append(lambda: _verified(ended))
            checks += [] if trial.scheme == "hogwild" else [lambda: _replayed(ended)]
            checks += [lambda: _same_bits(trial, ended)] if trial.exact else []
    for check in checks:
        try:
            found += check()
        except Exception as error:
            found.append(f"{type(error).__name__} while checking: {error}")
    return found


def _trained(ended: Ended) -> bool:
    return bool((RunDirectory(ended.place).result() or {}).get("updates"))


def _end(trial: Trial, ended: Ended) -> Iterator[str]:
    wanted = 130 if trial.ends == "signal" else 0
    if ended.code != wanted:
        yield f"exit code {ended.code} instead of {wanted}: {ended.text[-1500:]}"
        return
    if "Traceback" in ended.text:
        yield f"a traceback: {ended.text[-1500:]}"
    place = RunDirectory(ended.place)
    states = {"goal": RunState.DONE, "seconds": RunState.DONE, "signal": RunState.INTERRUPTED}
    # a second signal ends the command at once: if the launcher was not there yet, the run has a plan and no result
    asked = sum(blow.whom in ("launcher", "group") for blow in trial.blows)
    early = trial.ends == "signal" and asked > 1 and not (ended.place / "result.json").exists()
    if (ended.place / "plan.json").exists() and not early and place.state is not states[trial.ends]:
        yield f"the run's state is {place.state}"
    result = place.result() or {}
    if trial.ends == "goal" and result.get("updates", 0) < trial.settings["steps"]:
        yield f"it is done with {result.get('updates')} of {trial.settings['steps']} updates"


def _nothing_left(ended: Ended, shared_before: set[str]) -> Iterator[str]:
    if ended.left:
        yield f"processes are left: {ended.left}"
    if more := shared_files() - shared_before:
        yield f"shared memory is left: {more}"


def _commands(ended: Ended) -> Iterator[str]:
    """The next commands that people type."""
    for words in (["runs", str(ended.place.parent)], ["show", str(ended.place)]):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                main.main(words)
            except SystemExit as leaves:
                if leaves.code:
                    yield f"{words[0]} ends with {leaves.code}: {out.getvalue()}"


def _verified(ended: Ended) -> Iterator[str]:
    for check in verify(ended.place).checks:
        if check.fits is False:
            yield f"verify: {check.what}: {check.text}"


def _replayed(ended: Ended) -> Iterator[str]:
    """The same bits once more, and an account that adds up."""
    yield from audit(ended.place)


def _same_bits(trial: Trial, ended: Ended) -> Iterator[str]:
    result = RunDirectory(ended.place).result() or {}
    if "not exact" in " ".join(result.get("warnings", ())):
        return  # a worker died while the run ended, and that was said
    settings = {name: trial.settings[name] for name in ("task", "seed", "micro")}
    expected = simulate(
        settings.pop("task"),
        trial.scheme,
        exact=True,
        steps=result["updates"],
        warn=lambda _: None,
        **settings,
        **trial.hyper,
    )
    if expected.digest != result["digest"]:
        yield f"an exact run has other bits than the simulator: {result['digest']}, not {expected.digest}"
