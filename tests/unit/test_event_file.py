"""Event files written without TensorBoard, as TensorBoard reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status as HparamsStatus
from test_live import role, status

from paceline.config.plan import Plan
from paceline.processes.supervisor.progress import _line
from paceline.processes.supervisor.run_summaries import RunSummaries
from paceline.processes.supervisor.status import RoleState
from paceline.runs.event_file import EventFile, SessionStatus
from paceline.runs.progress_log import ProgressLog


def accumulated(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def texts(found: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(f"{tag}/text_summary")]


def session(found: EventAccumulator) -> tuple[dict[str, Any], Any]:
    contents = found.PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
    end = metadata.parse_session_end_info_plugin_data(contents[metadata.SESSION_END_INFO_TAG])
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}, end


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.scalars({"loss": 0.5, "größe": -3.0, "huge": 1e300, "nan": math.nan}, 7, 1234.5)
    file.scalars({"loss": 0.25}, 1 << 40, 1235.5)
    file.text("note", "ünlike **x**", 3, 1236.0)
    file.counts("staleness", {}, 8)
    file.counts("staleness", {0: 3, 1: 1, 5: 3}, 9)
    hyper: dict[str, str | float | bool] = {"lr": 0.1, "rule": "sgd", "exact": False, "none": ""}
    file.session("run-1", hyper, SessionStatus.FAILURE, 10.0, 20.5)
    found = accumulated(tmp_path)
    assert [(one.step, one.wall_time, one.value) for one in found.Scalars("loss")] == [
        (7, 1234.5, 0.5),
        (1 << 40, 1235.5, 0.25),
    ]
    assert found.Scalars("größe")[0].value == -3.0
    assert found.Scalars("huge")[0].value == math.inf
    assert math.isnan(found.Scalars("nan")[0].value)
    (histogram,) = found.Histograms("staleness")
    told = histogram.histogram_value
    assert (histogram.step, told.min, told.max, told.num, told.sum, told.sum_squares) == (9, -0.5, 5.5, 7, 16, 76)
    assert dict(zip(told.bucket_limit, told.bucket, strict=True)) == {-0.5: 0, 0.5: 3, 1.5: 1, 4.5: 0, 5.5: 3}
    assert histogram.wall_time > 1236.0
    assert texts(found, "note") == [(3, "ünlike **x**")]
    read, end = session(found)
    assert read == hyper
    assert (end.status, end.end_time_secs) == (HparamsStatus.STATUS_FAILURE, 20.5)


def test_the_statuses_are_those_of_the_plugin() -> None:
    assert {one.name: int(one) for one in SessionStatus}.items() <= {
        name.removeprefix("STATUS_"): number for name, number in HparamsStatus.items()
    }.items()


def test_the_course_of_a_run_is_curves_and_texts(tmp_path: Path) -> None:
    summaries = RunSummaries(Plan(task="toy", scheme="async", directory=str(tmp_path)), "class Async: ...")
    log = ProgressLog(tmp_path, 1, 0.0, summaries.line)
    log.begin(["chief", "worker:1", "server:0"], 100)
    for number, state in enumerate([RoleState.WAITING, RoleState.TRAINING, RoleState.WAITING, RoleState.WAITING]):
        roles = (role("chief", loss=1.0), role("worker:1", state=state, loss=3.0), role("server:0", loss=math.nan))
        log.note(_line(status(*roles, updates=10 * number)), [one.name for one in roles])
    log.event("warn", "worker:1 died (signal SIGKILL); restarting it", "worker:1")
    found = accumulated(tmp_path / "summaries" / "run")
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(0, 2.0), (10, 2.0), (20, 2.0), (30, 2.0)]
    assert [round(one.value, 3) for one in found.Scalars("waiting/worker:1")] == [1.0, 0.5, 0.667, 0.75]
    assert found.Scalars("waiting/chief")[-1].value == 0.0
    assert texts(found, "events") == [(30, "**warn** (worker:1): worker:1 died (signal SIGKILL); restarting it")]
    assert "class Async" in texts(found, "scheme")[0][1]
    assert '"task": "toy"' in texts(found, "settings")[0][1]


def test_a_run_without_a_result_has_a_session_all_the_same_and_the_next_launch_replaces_it(tmp_path: Path) -> None:
    plan = Plan(task="toy", scheme="async", directory=str(tmp_path / "toy-async-001"), seed=3)
    RunSummaries(plan, "").end({"lr": 0.5, "sizes": [2, 3], "rule": "sgd", "none": None}, None, "it broke")
    final = tmp_path / "toy-async-001" / "summaries" / "final"
    hyper, end = session(accumulated(final))
    assert hyper["lr"] == 0.5
    assert (hyper["sizes"], hyper["rule"], hyper["seed"], hyper["exact"]) == ("[2, 3]", "sgd", 3.0, False)
    assert "none" not in hyper
    assert end.status == HparamsStatus.STATUS_FAILURE
    assert texts(accumulated(final), "error")[0][1].splitlines()[1] == "it broke"
    RunSummaries(plan, "").end({"lr": 0.5}, None, "")
    assert len(list(final.iterdir())) == 1
    assert session(accumulated(final))[1].status == HparamsStatus.STATUS_UNKNOWN


def test_the_end_of_each_log_is_there(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "node-1").mkdir(parents=True)
    (logs / "chief.log").write_text("begin" + "x" * 9000 + "\nthe end")
    (logs / "node-1" / "worker-1.log").write_bytes(b"caf\xe9")
    (logs / "worker-2.log").touch()
    RunSummaries(Plan(directory=str(tmp_path)), "").end({}, None, "")
    found = accumulated(tmp_path / "summaries" / "final")
    ((_, chief),) = texts(found, "log/chief")
    assert chief.endswith("\nthe end\n~~~~~~")
    assert "begin" not in chief
    assert "caf\ufffd" in texts(found, "log/node-1/worker-1")[0][1]
    assert "log/worker-2/text_summary" not in found.Tags()["tensors"]


def test_a_folder_that_cannot_be_written_to_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "summaries").write_text("no folder")
    summaries = RunSummaries(Plan(directory=str(tmp_path)), "")
    summaries.line({"launch": 1, "at": 0.0, "roles": ["chief"], "goal": None})
    summaries.line({"event": "warn", "at": 0.0, "text": "x"})
    summaries.end({}, None, "")
    assert (tmp_path / "summaries").read_text() == "no folder"
