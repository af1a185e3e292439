"""The command line as a user meets it: real processes, real exit codes, what stands on stdout and on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config import discovery

FIELDS = {
    *("scheme", "task", "workers", "updates", "gradients", "samples", "virtual_seconds", "staleness", "metrics"),
    *("loss", "digest", "final"),
}


def paceline(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    env = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False)


def test_json_is_one_object_and_all_of_stdout() -> None:
    ran = paceline("simulate", "toy", "--scheme", "agn", "window=3", "--workers", "4", "--steps", "20", "--json")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\n") == 1
    result = json.loads(ran.stdout)
    assert result.keys() >= FIELDS
    assert result["staleness"].keys() == {"mean", "max", "histogram"}
    assert (result["scheme"], result["task"], result["workers"], result["updates"]) == ("agn", "toy", 4, 20)
    assert len(result["final"]) == 4
    assert sum(result["staleness"]["histogram"].values()) == 20


def test_final_is_null_for_a_long_vector() -> None:
    ran = paceline("simulate", "quadratic", "-s", "sync", "task.dim=17", "--steps", "3", "--json")
    assert json.loads(ran.stdout)["final"] is None


def test_one_step_of_sgd_on_toy_in_closed_form() -> None:
    ran = paceline("simulate", "toy", "-s", "sgd", "lr=0.125", "--steps", "3", "--json")
    a0, a1, b0, b1 = json.loads(ran.stdout)["final"]
    left = -100 * (1 - 2 * 0.125) ** 3
    assert (a0 + b0 - 100, a1 + b1 - 100) == (left, left)


def test_closing_table_tells_what_happened() -> None:
    ran = paceline("simulate", "digits-mlp", "-s", "async", "--steps", "30", "--workers", "2")
    assert ran.returncode == 0, ran.stderr
    for word in ("loss", "accuracy", "updates", "gradients", "virtual time", "staleness mean / max", "digest"):
        assert word in ran.stdout
    assert ran.stderr == ""


def test_list_has_every_member_and_show_tells_one() -> None:
    listed = paceline("list").stdout
    for family in discovery.FAMILIES.values():
        for name in family():
            assert name in listed
    told = paceline("show", "downpour").stdout
    for words in ("NIPS 2012", "n_push", "adagrad", "paceline/schemes/downpour.py", "worker:", "server:"):
        assert words in told
    assert "task.noise" in paceline("show", "quadratic").stdout
    assert "beta1" in paceline("show", "adam").stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["simulate", "toy", "--scheme", "downpor"], 2, "no scheme 'downpor'; did you mean 'downpour'?"),
        (["simulate", "toyy"], 2, "did you mean 'toy'?"),
        (["simulate", "toy", "windo=3", "-s", "agn"], 2, "did you mean 'window'?"),
        (["simulate", "toy", "window=0", "-s", "agn"], 2, "window must be at least 1, not 0"),
        (["simulate", "toy", "window=two", "-s", "agn"], 2, "window must be a whole number, not 'two'"),
        (["simulate", "toy", "reduce=max"], 2, "reduce must be one of mean, sum, not 'max'"),
        (["simulate", "toy", "rule=adm"], 2, "did you mean 'adam'?"),
        (["simulate", "toy", "aggregate=6"], 2, "use the scheme sync-repeat"),
        (["simulate", "toy", "--workers", "0"], 2, "workers must be at least 1, not 0"),
        (["simulate", "toy", "--steps", "0"], 2, "steps must be at least 1, not 0"),
        (["simulate", "toy", "--batch", "0"], 2, "batch must be at least 1, not 0"),
        (["simulate", "toy", "--feed", "all"], 2, "feed must be one of shared, shard, slice"),
        (["simulate", "toy", "--compute", "exp:1"], 2, "did you mean 'exponential'?"),
        (["simulate", "toy", "--compute", "trace:absent.csv"], 2, "absent.csv"),
        (["simulate", "toy", "--fault", "kil:1@step=2"], 2, "kill"),
        (["simulate", "toy", "--fault", "kill:9@step=2"], 2, "workers are 0 to 3"),
        (["simulate", "toy", "--speeds", "1,2"], 2, "2 speeds were given for 4 workers"),
        (["simulate", "toy", "batch=3"], 2, "--batch"),
        (["simulate", "toy", "quorum=hold"], 2, "--quorum"),
        (["simulate", "toy", "lr"], 2, "key=value"),
        (["simulate", "toy", "-s", "sgd", "--workers", "2"], 2, "it takes 1 worker, not 2"),
        (["simulate", "toy", "-s", "async", "lr=3", "--workers", "2"], 1, "the loss is inf"),
        (["simulate", "toy", "--workers", "2", "--fault", "kill:1@step=1", "--quorum", "hold"], 1, "dead: worker 1"),
        (["simulate", "absent.py:task"], 2, "no file 'absent.py'"),
        (["simulate", "absent_module:task"], 2, "no module 'absent_module'"),
        (["list", "scheme"], 2, "did you mean 'schemes'?"),
        (["show", "easgdd"], 2, "did you mean 'easgd'?"),
        (["data", "minst"], 2, "did you mean 'mnist'?"),
    ],
)
def test_a_mistake_is_one_clear_line_and_a_code(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr()
    assert ended.value.code == code, shown.err
    assert said in shown.err
    assert shown.out == ""


def test_a_mistake_in_a_real_process_shows_no_traceback() -> None:
    ran = paceline("simulate", "toy", "--scheme", "downpor")
    assert ran.returncode == 2
    assert ran.stderr == "error: no scheme 'downpor'; did you mean 'downpour'?\n"


def test_damaged_data_has_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"not the published bytes")
    ran = paceline("data", "mnist", "--dir", str(tmp_path), PACELINE_OFFLINE="1")
    assert ran.returncode == 3
    assert "train-images" in ran.stderr
    assert (tmp_path / "train-images-idx3-ubyte").read_bytes() == b"not the published bytes"


def test_crossing_a_limit_warns_on_stderr_and_runs() -> None:
    ran = paceline("simulate", "toy", "-s", "async", "lr=0.3", "--workers", "4", "--steps", "5", "--json")
    assert ran.returncode == 0
    assert "crosses 0.445" in ran.stderr
    assert json.loads(ran.stdout)["warnings"]


def test_a_user_file_gives_task_and_scheme(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from torch import nn\n"
        "from paceline import Scheme, TorchTask\n"
        "from paceline.schemes.allreduce import AllReduce\n"
        "x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))\n"
        "task = TorchTask(lambda: nn.Linear(3, 1), nn.MSELoss(), (x, x.sum(1, keepdim=True)), batch=8, name='sums')\n"
        "def sized(width: int = 2) -> TorchTask:\n"
        "    return TorchTask(lambda: nn.Linear(width, 1), nn.MSELoss(), (x[:, :width], x[:, :1]), batch=4)\n"
        "@dataclass(frozen=True)\n"
        "class Mine(AllReduce, name='mine'):\n"
        "    '''Mine.'''\n",
        encoding="utf-8",
    )
    ran = paceline("simulate", "mine.py:task", "-s", "mine.py:Mine", "--steps", "100", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["task"], result["scheme"]) == ("sums", "mine")
    assert result["loss"] < 0.01
    sized = paceline("simulate", "mine.py:sized", "task.width=3", "--steps", "2", "--json", cwd=tmp_path)
    assert len(json.loads(sized.stdout)["final"]) == 4
    wrong = paceline("simulate", "mine.py:tusk", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'task'?" in wrong.stderr


def test_an_error_in_the_users_loss_names_worker_and_step(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import torch\nfrom torch import nn\nfrom paceline import TorchTask\n"
        "def loss(out, target):\n    raise ZeroDivisionError('in my loss')\n"
        "task = TorchTask(lambda: nn.Linear(1, 1), loss, (torch.ones(8, 1), torch.ones(8, 1)))\n",
        encoding="utf-8",
    )
    ran = paceline("simulate", "bad.py:task", cwd=tmp_path)
    assert ran.returncode == 1
    assert "in my loss" in ran.stderr
    assert "worker:0, step 0" in ran.stderr


def test_version_and_help() -> None:
    assert paceline("--version").stdout.startswith("paceline 0.")
    assert "Exit codes" in paceline("--help").stdout


def test_a_run_that_fails_prints_what_it_had_reached() -> None:
    ran = paceline("simulate", "toy", "-s", "async", "lr=3", "--workers", "2", "--json")
    assert ran.returncode == 1
    reached = json.loads(ran.stdout)
    assert reached["updates"] > 0
    assert "the loss is inf" in reached["error"]


def test_an_interrupted_run_says_so() -> None:
    command = [sys.executable, "-m", "paceline", "simulate", "toy", "-s", "sync", "lr=0.001", "--hook", "log:every=1"]
    with subprocess.Popen([*command, "--steps", "100000000"], stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert run.stderr.readline().startswith("worker:0 step 1")  # it is under way
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
    assert run.returncode == 130
    assert "interrupted" in rest


def test_what_stands_in_is_not_what_was_asked_for(tmp_path: Path) -> None:
    ran = paceline("data", "mnist", PACELINE_DATA="", PACELINE_CACHE=str(tmp_path), PACELINE_OFFLINE="1")
    assert ran.returncode == 3
    assert "NOT MNIST" in ran.stderr
