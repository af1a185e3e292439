"""`paceline watch` and `--watch`, with real runs and in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from beds import chromium
from processes import until

from paceline.config.plan import Plan
from paceline.processes.supervisor.progress import Progress
from paceline.processes.supervisor.status import RoleState, RoleStatus, Status
from paceline.runs import checkpoint
from paceline.runs.progress_log import ProgressLog
from paceline.runs.run_directory import RunDirectory

# of every chart: the width that it was made for, and that it is shown with
DRAWN = """[...document.querySelectorAll('.charts svg, .wide svg')]
    .map((one) => [one.viewBox.baseVal.width, one.getBoundingClientRect().width])"""
PACELINE = [sys.executable, "-m", "paceline"]


@contextmanager
def started(*words: str, cwd: Path, err: IO[bytes] | int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*PACELINE, *words], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def address_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[chromium.Chromium]:
    if chromium.PROGRAM is None:
        pytest.skip("the page is not looked at: chromium is not installed")
    with chromium.chromium(tmp_path / "profile") as made:
        made.look(1280, 900)
        yield made


def role(name: str, state: RoleState, waits_for: str = "") -> RoleStatus:
    return RoleStatus(name, state, 4711, 12, 100.0, 0.5, 1.0, 0, waits_for)


def recorded(folder: Path, workers: int) -> RunDirectory:
    """A run as its launcher records it, without processes."""
    run = RunDirectory.create(folder, "run")
    run.write_plan({"task": "toy", "scheme": "allreduce", "workers": workers, "servers": 0, "steps": 100})
    names = ["chief", *(f"worker:{n}" for n in range(1, workers))]
    log = ProgressLog(run.path, 1, 0.0)
    log.begin(names, 100)
    progress = Progress(run, Plan(), [], lambda _: None, log)
    for n in range(4):
        waiting = [role(name, RoleState.WAITING, "worker 3 at a mean") for name in names]
        log._next = 0.0
        progress.note(Status("toy", tuple(waiting), 10 * n, 100, 1.0 * n, 500.0 + n, {"loss": 1.0}, ages=(3, 2, 1)))
    return run


def test_a_run_with_a_killed_server_that_is_stopped_on_the_page(tmp_path: Path, browser: chromium.Chromium) -> None:
    words = ["train", "digits-mlp", "-s", "downpour", "--workers", "2", "--steps", "1000000", "--every", "500"]
    with started("watch", cwd=tmp_path) as page:
        browser.open(address_of(page))
        browser.until("document.querySelector('#empty').innerText.includes('There are no runs in')")
        with started(*words, "--dir", "runs/one", cwd=tmp_path) as run:
            browser.until("document.querySelector('.card .pill').innerText == 'running'")
            browser.until("document.querySelectorAll('.card path.curve').length >= 3")
            status = tmp_path / "runs/one/status.json"
            until(lambda: status.exists() and json.loads(status.read_text())["updates"] > 0, 60, "first updates")
            pids = {one["name"]: one["pid"] for one in json.loads(status.read_text())["roles"]}
            os.kill(pids["server:0"], signal.SIGKILL)
            browser.until("document.querySelector('.events').innerText.includes('server:0 died (signal SIGKILL)')")
            browser.until("document.querySelector('.events').innerText.includes('server:0 is back')")
            assert "token" not in browser.value("location.href")
            browser.value("document.querySelector('button.stop').click()")
            browser.value("document.querySelector('button.stop').click()")  # yes
            assert run.wait(timeout=60) == 130
            browser.until("document.querySelector('.card .pill').innerText == 'interrupted'")
        steps = checkpoint.steps(tmp_path / "runs/one/checkpoints")
        result = json.loads((tmp_path / "runs/one/result.json").read_text())
        assert steps[-1] == result["updates"] > 0  # the last checkpoint is of the end
        browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        browser.until("document.querySelector('.card').innerText.includes('async def step')")
        shutil.rmtree(tmp_path / "runs/one")
        browser.until("document.querySelector('.card').innerText.includes('has been deleted')")
        page.terminate()
        assert page.wait(timeout=30) == 0
    assert browser.logged == []
    browser.until("document.querySelector('#link').innerText.includes('no answer')")


def test_a_browser_reconnects_and_an_old_address_is_refused(tmp_path: Path, browser: chromium.Chromium) -> None:
    recorded(tmp_path / "runs/one", 2)
    with started("watch", cwd=tmp_path) as page:
        address = address_of(page)
        browser.open(address)
        browser.until("document.querySelectorAll('.card .charts svg').length >= 3")
        sizes = browser.value(DRAWN)
        assert len(sizes) >= 3
        assert all(abs(made - shown) < 2 for made, shown in sizes), "a chart is not shown as large as it was made"
        os.kill(page.pid, signal.SIGSTOP)  # as a tunnel that hangs
        browser.until("document.querySelector('#link').classList.contains('lost')")
        os.kill(page.pid, signal.SIGCONT)
        browser.until("!document.querySelector('#link').classList.contains('lost')")
        page.send_signal(signal.SIGINT)
        assert page.wait(timeout=30) == 0
    found = re.search(r":(\d+)/", address)
    assert found is not None
    with started("watch", "--port", found[1], cwd=tmp_path) as again:
        address_of(again)
        browser.until("document.querySelector('#link').innerText.includes('earlier')")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_64_roles_and_two_runs_fit_the_screen(
    tmp_path: Path, browser: chromium.Chromium, width: int, dark: bool
) -> None:
    runs = [recorded(tmp_path / "runs/one", 64), recorded(tmp_path / "runs/two", 2)]
    for n in (1, 2):
        runs[0].append_history({"update": 10 * n, "seconds": 1.0 * n, "loss": 1.0 / n})
    browser.look(width, 800, dark=dark, phone=width < 500)
    with runs[0].lock(), runs[1].lock(), started("watch", cwd=tmp_path) as page:
        browser.open(address_of(page))
        browser.until("document.querySelectorAll('.card').length == 2")
        browser.until("document.querySelectorAll('.card')[0].querySelectorAll('tbody tr').length >= 64")
        assert browser.value("document.documentElement.scrollWidth") <= width
        tables = browser.value(
            "[...document.querySelectorAll('table')].map((one) => [one.scrollWidth, one.parentElement.clientWidth])"
        )
        assert len(tables) == 3
        assert all(table <= room for table, room in tables), tables
        assert browser.value("document.querySelectorAll('svg .edge.waits').length") > 64
        assert not browser.value("document.querySelector('#comparison').hidden")
        named = "[...one.querySelectorAll('.legend span')].length"
        drawn = f"one.querySelectorAll('path.curve').length - {named}"
        missing = browser.value(f"[...document.querySelectorAll('#comparison .panel')].map((one) => {drawn})")
        assert missing == [0] * 4  # a run without a curve, here of evaluations, is not in the legend
        os.kill(page.pid, signal.SIGSTOP)  # no news comes: what is drawn now has been drawn at the first look
        try:
            wrong = f"{DRAWN}.filter(([made, shown]) => Math.abs(made - shown) >= 2)"
            assert browser.value(f"{DRAWN}.length") > 10
            assert browser.value(wrong) == []
            before = browser.value(f"{DRAWN}[0][1]")
            browser.look(width - 100, 800, dark=dark, phone=width < 500)
            browser.until(f"{DRAWN}[0][1] < {before} - 20 && {wrong}.length == 0")
        finally:
            os.kill(page.pid, signal.SIGCONT)
        ground = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark
    assert browser.logged == []


def test_a_page_that_ends_with_the_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["train", "digits-mlp", "-s", "async", "--workers", "1", "--steps", "1000000", "--dir", "run", "--watch"]
    with log.open("wb") as err, started(*words, "--plain", cwd=tmp_path, err=err) as run:
        place = tmp_path / "run/watch.url"
        until(lambda: place.exists() and (tmp_path / "run/status.json").exists(), 60, "a status")
        assert place.stat().st_mode & 0o777 == 0o600
        address = place.read_text()
        port = int(re.search(r":(\d+)/", address)[1])  # type: ignore[index]
        taken = subprocess.run(
            [*PACELINE, "watch", "--port", str(port)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert taken.returncode == 2
        assert f"port {port} is taken" in taken.stderr
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
    assert not place.exists()
    assert "token" not in log.read_text()  # of a terminal that is none, others may read the log
    closed = subprocess.run([*PACELINE, "watch", "--port", str(port), "nothing"], cwd=tmp_path, capture_output=True)
    assert b"no run 'nothing'" in closed.stderr


def test_watch_does_not_go_with_a_launcher(tmp_path: Path) -> None:
    words = ["train", "digits-mlp", "--on", "slurm", "--watch"]
    told = subprocess.run([*PACELINE, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "--watch does not go with --on" in told.stderr
