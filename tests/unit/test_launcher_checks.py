"""The checks of paceline/testing/launchers.py find launchers that break the contract."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.launcher import Job, Launcher
from paceline.testing import launchers


class Sound(Launcher):
    """Runs the command of a job that has one task."""

    name = "sound"
    keys = {"speed": "of the engine; default: 1"}  # noqa: RUF012

    def launch(self, job: Job) -> int:
        return os.spawnvp(os.P_WAIT, job.command[0], job.command)

    def shown(self, job: Job) -> str:
        return f"{job.number('speed', 1)} {' '.join(job.command)}"


class Nameless(Sound):
    name = "No name"


class Careless(Sound):
    def check(self, job: Job) -> None:
        """Takes any key."""


class Undeclared(Sound):
    def shown(self, job: Job) -> str:
        return f"{job.options.get('colour')} {super().shown(job)}"


class Writing(Sound):
    def shown(self, job: Job) -> str:
        (job.directory / "script").write_text("x")
        return super().shown(job)


class Exporting(Sound):
    def shown(self, job: Job) -> str:
        os.environ["PACELINE_TEST_OF_LAUNCHERS"] = "1"
        return super().shown(job)


class Telling(Sound):
    def shown(self, job: Job) -> str:
        return f"PACELINE_SECRET={job.secret.hex()} {super().shown(job)}"


class Swallowing(Sound):
    def launch(self, job: Job) -> int:
        super().launch(job)
        return 0


class Leaving(Sound):
    def launch(self, job: Job) -> int:
        path = job.directory / "secret"
        path.write_text(job.secret.hex())
        path.chmod(0o644)
        return super().launch(job)


@pytest.mark.parametrize("check", launchers.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_launcher_passes(check: Callable[[Launcher, Path], None], tmp_path: Path) -> None:
    check(Sound(), tmp_path)


@pytest.mark.parametrize(
    ("launcher", "check", "why"),
    [
        (Nameless, launchers.check_declaration, "is no name for --on"),
        (Careless, launchers.check_unknown_keys, "was accepted"),
        (Undeclared, launchers.check_declared_keys, "`keys` lacks colour"),
        (Writing, launchers.check_shown, "shown changed files"),
        (Exporting, launchers.check_shown, "shown changed files, the environment"),
        (Telling, launchers.check_secret, "the secret is in the text of shown"),
        (Swallowing, launchers.check_exit_code, "the chief ended with 3, launch returned 0"),
        (Leaving, launchers.check_exit_code, "which others can read"),
    ],
)
def test_a_broken_one_does_not(
    launcher: type[Launcher],
    check: Callable[[Launcher, Path], None],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TEST_OF_LAUNCHERS", "0")
    with pytest.raises(AssertionError, match=why):
        check(launcher(), tmp_path)
