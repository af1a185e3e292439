"""Manifests that Kubernetes accepts, and a launch that speaks to a kubectl of the test's own."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import RunError, UsageError
from paceline.launcher import Job
from paceline.launchers import _kubernetes_manifests, kubernetes
from paceline.launchers._kubernetes_manifests import secret
from paceline.launchers._kubernetes_settings import KINDS, KubernetesSettings
from paceline.launchers.kubernetes import KubernetesLauncher

TASKS = ("chief", "worker:0", "worker:1", "server:0", "evaluator")
SECRET = bytes(range(32))
EVERYTHING = {
    **{"namespace": "research", "memory": "4Gi", "cpu": "500m", "gpus": "2", "volume": "runs", "ttl": "60"},
    **{"service-account": "trainer", "image-pull-policy": "IfNotPresent", "restarts": "7", "grace": "30"},
}


def job(tasks: tuple[str, ...] = TASKS, name: str = "mnist_MLP-async-001", said: Any = None, **options: str) -> Job:
    return Job(
        command=("paceline", "train", "mnist-mlp", "--scheme", "async", "lr=0.1", "--dir", "/runs/a"),
        tasks=tasks,
        directory=Path("/runs/a"),
        name=name,
        options={"image": "example.org/paceline:1", **{key.replace("_", "-"): value for key, value in options.items()}},
        threads=2,
        secret=SECRET,
        say=said or (lambda text: None),
    )


def manifests(asked: Job) -> list[dict[str, Any]]:
    return _kubernetes_manifests.manifests(KubernetesSettings(asked))


def found(asked: Job, kind: str) -> dict[str, Any]:
    return next(one for one in manifests(asked) if one["kind"] == kind)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("version", ["1.31", "1.33", "1.35", "1.37"])
def test_kubernetes_accepts_the_manifests(version: str, options: dict[str, str]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    asked = job(**{key.replace("-", "_"): value for key, value in options.items()})
    for manifest in [*manifests(asked), secret(KubernetesSettings(asked))]:
        validate.validate(manifest, version, strict=True)


def test_the_check_of_manifests_can_fail() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    wrong = found(job(), "Job")
    wrong["spec"]["completion"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.35", strict=True)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_a_jobset_is_what_its_models_know(options: dict[str, str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    manifest = found(job(kind="jobset", **{key.replace("-", "_"): value for key, value in options.items()}), "JobSet")
    read = models.JobsetV1alpha2JobSet.from_dict(manifest)
    assert read.to_dict() == manifest  # an unknown field is silently left away by the models


def test_what_is_printed_is_what_is_meant() -> None:
    for kind in KINDS:
        asked = job(kind=kind, **{key.replace("-", "_"): value for key, value in EVERYTHING.items()})
        assert list(yaml.safe_load_all(KubernetesLauncher().shown(asked))) == manifests(asked)


def test_the_secret_is_never_shown() -> None:
    text = KubernetesLauncher().shown(job())
    assert SECRET.hex() not in text
    assert "openssl rand -hex 32" in text
    assert "create secret generic mnist-mlp-async-001-secret --from-file=secret=/dev/stdin" in text


def test_a_pod_learns_its_task_by_its_number() -> None:
    told = found(job(), "ConfigMap")["data"]
    assert told == {
        "PACELINE_CLUSTER": "chief=1,worker=2,server=1,evaluator=1",
        "PACELINE_TASKS": "chief,worker:0,worker:1,server:0,evaluator",
        "PACELINE_HUB": "mnist-mlp-async-001-0.mnist-mlp-async-001:7070",
        "PACELINE_PORTS": "7070-7089",
    }
    spec = found(job(), "Job")["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (5, 5, "Indexed")
    assert spec["template"]["spec"]["subdomain"] == found(job(), "Service")["metadata"]["name"]


def test_the_hub_is_where_the_chief_is() -> None:
    asked = job(tasks=("server:0", "chief", "worker:0"))
    assert found(asked, "ConfigMap")["data"]["PACELINE_HUB"].startswith("mnist-mlp-async-001-1.")
    assert found(asked, "Job")["spec"]["successPolicy"]["rules"] == [{"succeededIndexes": "1"}]


def test_a_jobset_has_a_job_for_each_role_and_the_volume_for_the_chief() -> None:
    manifest = found(job(kind="jobset", volume="runs"), "JobSet")
    jobs = {one["name"]: one["template"]["spec"] for one in manifest["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in jobs.items()} == {
        **{"chief": 1, "worker": 2},
        **{"server": 1, "evaluator": 1},
    }
    assert manifest["spec"]["network"]["subdomain"] == "mnist-mlp-async-001"
    volumes = {name: spec["template"]["spec"]["volumes"][0] for name, spec in jobs.items()}
    assert volumes["chief"] == {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}}
    assert volumes["worker"] == {"name": "run", "emptyDir": {}}
    environment = jobs["worker"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PACELINE_TASKS", "value": "worker:0,worker:1"} in environment
    hub = found(job(kind="jobset"), "ConfigMap")["data"]["PACELINE_HUB"]
    assert hub == "mnist-mlp-async-001-chief-0-0.mnist-mlp-async-001:7070"


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_was_asked_to_end_is_replaced_and_does_not_count_as_failed(kind: str) -> None:
    """Its exit code is not 0: an index of a job that ends with 0 is complete, and nobody takes its place."""
    manifest = manifests(job(kind=kind))[-1]["spec"]
    specs = [one["template"]["spec"] for one in manifest["replicatedJobs"]] if kind == "jobset" else [manifest]
    for spec in specs:
        ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
        assert {128 + signal.SIGTERM, 128 + signal.SIGINT} in [
            set(rule.get("onExitCodes", {}).get("values", ())) for rule in ignored
        ]


@pytest.mark.parametrize("name", ["a" * 100, "7", "__", "Ä-ß", "x-", "a.b/c"])
def test_any_name_of_a_run_becomes_one_of_a_host(name: str) -> None:
    for manifest in manifests(job(name=name)):
        given = manifest["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", given)
        assert len(f"{given}-evaluator-0-5") <= 63 or given.endswith("-config")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": ""}, "needs --engine image="),
        ({"kind": "deployment"}, "kind"),
        ({"gpus": "two"}, "--engine gpus=two: a whole number"),
        ({"memory": "4 GB"}, "--engine memory=4 GB: a quantity"),
        ({"shm": "lots"}, "--engine shm=lots: a quantity"),
        ({"queue": "Team A"}, "LocalQueue of Kueue"),
        ({"network_policy": "perhaps"}, "yes or no"),
        ({"template": "/nowhere.yaml"}, "--engine template=/nowhere.yaml: the file cannot be read"),
        ({"code": "/nowhere.py"}, "--engine code=/nowhere.py: the file cannot be read"),
        ({"image_pull_policy": "never"}, "Never"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        KubernetesLauncher().shown(job(**options))


def test_without_kubectl_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=re.escape("--dry-run > job.yaml")):
        KubernetesLauncher().launch(job())


KUBECTL = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([words, sys.stdin.read() if "-" in words else ""]) + "\\n")
def answer(name):
    left = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(left[1:] or left))
    return left[0]
if "get" in words:
    print(json.dumps(answer("pods" if "pods" in words else "states")))
if "logs" in words:
    print("log of " + words[words.index("--follow") + 1])
if words[0] == "apply" and (folder / "refuse").exists():
    sys.exit("forbidden")
"""


class Cluster:
    """A kubectl that notes what it was asked and answers as it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)), encoding="utf-8")
        program.chmod(0o755)

    def answers(self, states: list[str], pods: list[list[tuple[str, int | None]]]) -> None:
        conditions = [[{"type": state, "status": "True"}] if state else [] for state in states]
        (self.folder / "states").write_text(json.dumps([{"status": {"conditions": one}} for one in conditions]))
        (self.folder / "pods").write_text(json.dumps([{"items": [self._pod(*pod) for pod in look]} for look in pods]))

    def _pod(self, name: str, code: int | None) -> dict[str, Any]:
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        phase = {None: "Running", 0: "Succeeded"}.get(code, "Failed")
        status = {"phase": phase, "containerStatuses": [{"state": state}]}
        return {"metadata": {"name": name, "creationTimestamp": name}, "status": status}

    def calls(self) -> list[tuple[list[str], str]]:
        return [tuple(json.loads(line)) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(kubernetes, "POLL", 0.0)
    return Cluster(tmp_path)


def test_a_launch_ends_with_the_job_and_leaves_nothing(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.answers(["", "", "Complete"], [[("m-0-a", None)], [("m-0-a", 137), ("m-0-b", None)], [("m-0-b", 0)]])
    said: list[str] = []
    assert KubernetesLauncher().launch(job(said=said.append, namespace="research")) == 0
    assert capfd.readouterr().out.splitlines() == ["log of m-0-a", "log of m-0-b"]  # the second after a loss
    assert "the chief's pod was replaced: m-0-b" in said
    calls = cluster.calls()
    assert all(words[:2] == ["--namespace", "research"] for words, _ in calls)
    assert not any(SECRET.hex() in " ".join(words) for words, _ in calls)
    assert [words[2] for words, text in calls if SECRET.hex() in text] == ["create"]
    gone = {words[3] for words, _ in calls if words[2] == "delete"}
    assert gone == {
        "secret",
        "configmap",
        "service",
        "networkpolicy",
    }  # the job stays for `ttl` seconds, to be looked at


def test_a_failed_job_gives_the_chiefs_exit_code(cluster: Cluster) -> None:
    cluster.answers(["Failed"], [[("m-0-a", 3)]])
    assert KubernetesLauncher().launch(job()) == 3


def test_a_chief_that_is_not_replaced_any_more_ends_the_job(cluster: Cluster) -> None:
    """Its index has failed; the job itself would go on until its other pods have failed as often."""
    cluster.answers([""], [[("m-0-a", 1)]])
    assert [kubernetes._names("0,3-5", number) for number in (0, 1, 3, 5, 6)] == [True, False, True, True, False]
    (cluster.folder / "states").write_text(json.dumps([{"status": {}}, {"status": {"failedIndexes": "0,3"}}]))
    assert KubernetesLauncher().launch(job()) == 1
    assert "job" in {words[1] for words, _ in cluster.calls() if words[0] == "delete"}


def test_what_kubectl_refuses_is_told_and_taken_back(cluster: Cluster) -> None:
    (cluster.folder / "refuse").touch()
    with pytest.raises(RunError, match="forbidden"):
        KubernetesLauncher().launch(job())
    assert "job" in {words[1] for words, _ in cluster.calls() if words[0] == "delete"}
