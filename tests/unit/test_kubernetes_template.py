"""Pods as their users want them: a template over the defaults, GPUs by role, own code, ports that a policy names."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_launch_kubernetes import found, job, manifests

from paceline.errors import UsageError
from paceline.launchers._kubernetes_settings import KINDS, LARGEST
from paceline.launchers._kubernetes_template import merged
from paceline.launchers.kubernetes import KubernetesLauncher

# what a site asks of its pods
TEMPLATE = """
metadata:
  labels: {team: vision}
  annotations: {sidecar.istio.io/inject: "false"}
spec:
  nodeSelector: {gpu: a100}
  tolerations:
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
  affinity:
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 1
          podAffinityTerm: {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {team: vision}}}
  priorityClassName: batch-low
  imagePullSecrets: [{name: registry}]
  securityContext: {fsGroup: 2000, runAsUser: 4711}
  containers:
    - name: paceline
      image: example.org/special:2
      env:
        - {name: OMP_NUM_THREADS, value: "4"}
        - {name: HOME, value: /home/me}
      resources:
        limits: {memory: 6Gi}
      volumeMounts:
        - {name: data, mountPath: /data, readOnly: true}
    - name: watcher
      image: example.org/watcher:1
  volumes:
    - name: data
      persistentVolumeClaim: {claimName: datasets}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 16Gi}
"""


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "pod.yaml"
    path.write_text(TEMPLATE)
    return str(path)


def pods(asked: Any) -> dict[str, dict[str, Any]]:
    """The pod template of each role; of a Job: of all, under its name."""
    last = manifests(asked)[-1]
    if last["kind"] == "Job":
        return {"all": last["spec"]["template"]}
    return {one["name"]: one["template"]["spec"]["template"] for one in last["spec"]["replicatedJobs"]}


def container(pod: dict[str, Any], name: str = "paceline") -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in pod["spec"]["containers"] if one["name"] == name)
    return found


def named(entries: list[dict[str, Any]], field: str = "name") -> dict[str, dict[str, Any]]:
    assert len({entry[field] for entry in entries}) == len(entries)
    return {entry[field]: entry for entry in entries}


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_counts_and_the_rest_stays(template: str, kind: str) -> None:
    plain, over = pods(job(kind=kind)), pods(job(kind=kind, template=template, image=""))
    assert plain.keys() == over.keys()
    for role, pod in over.items():
        spec, own = pod["spec"], container(pod)
        assert pod["metadata"]["labels"] == plain[role]["metadata"]["labels"] | {"team": "vision"}
        assert pod["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "imagePullSecrets"):
            assert spec[name] == yaml.safe_load(TEMPLATE)["spec"][name]
        assert spec["restartPolicy"] == "Never"
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (4711, True)
        assert own["image"] == "example.org/special:2"
        assert own["command"][:2] == ["paceline", "train"]
        variables = named(own["env"])
        assert variables["HOME"] == {"name": "HOME", "value": "/home/me"}
        assert {"OMP_NUM_THREADS", "PACELINE_SECRET", "PACELINE_ADDRESS"} <= variables.keys()
        assert own["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "6Gi"}}
        assert named(own["volumeMounts"], "mountPath").keys() == {"/runs/a", "/dev/shm", "/data"}
        volumes = named(spec["volumes"])
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert volumes["data"] == {"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}
        assert container(pod, "watcher") == {"name": "watcher", "image": "example.org/watcher:1"}


@pytest.mark.parametrize("version", ["1.31", "1.33", "1.35", "1.37"])
def test_kubernetes_accepts_what_comes_of_a_template(template: str, tmp_path: Path, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    (tmp_path / "my_task.py").write_text("def task():\n    return 'ä'\n")
    asked = job(template=template, code=str(tmp_path / "my_task.py"), queue="team", volume="runs")
    for manifest in manifests(asked):
        validate.validate(manifest, version, strict=True)
    for role, pod in pods(replace(asked, options=asked.options | {"kind": "jobset"}, gpus=1)).items():
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": pod}
        validate.validate(whole, version, strict=True)


def test_a_jobset_with_a_template_is_what_its_models_know(template: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    manifest = found(job(kind="jobset", template=template, queue="team"), "JobSet")
    assert models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest


def test_a_role_has_a_template_of_its_own(template: str, tmp_path: Path) -> None:
    (tmp_path / "worker.yaml").write_text(
        "kind: Pod\nspec: {nodeSelector: {gpu: h100}, containers: [{name: paceline, resources: {requests: {cpu: 8}}}]}"
    )
    asked = job(kind="jobset", template=template, template_worker=str(tmp_path / "worker.yaml"))
    told = pods(asked)
    assert told["worker"]["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert container(told["worker"])["resources"] == {"requests": {"cpu": 8}, "limits": {"memory": "6Gi"}}
    assert told["server"]["spec"]["nodeSelector"] == {"gpu": "a100"}
    assert container(told["server"])["resources"]["requests"] == {"cpu": "2"}
    with pytest.raises(UsageError, match=r"the pods of a Job are all alike.*kind=jobset"):
        manifests(job(template_worker=str(tmp_path / "worker.yaml")))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "is not YAML"),
        ("[]", "one document is needed"),
        ("spec: {}\n---\nspec: {}", "one document is needed"),
        ("kind: Deployment\nspec: {}", "it describes a Deployment"),
        ("specs: {}", "did you mean 'spec'"),
        ("spec: []", "spec must be a mapping"),
        ("spec: {restartPolicy: Always}", "spec.restartPolicy is paceline's own"),
        ("spec: {subdomain: x}", "spec.subdomain is paceline's own"),
        ("metadata: {labels: {paceline/run: x}}", "the label paceline/run is paceline's own"),
        ("metadata: {finalizers: [x]}", "metadata.finalizers is not taken over"),
        ("spec: {containers: [{image: x}]}", "containers[0] has no name; paceline's own container is called paceline"),
        ("spec: {containers: {name: x}}", "containers must be a list"),
        ("spec: {containers: [{name: paceline, command: [x]}]}", "command is paceline's own"),
        ("spec: {containers: [{name: paceline, env: [{value: x}]}]}", "env[0] has no name"),
        ("spec: {containers: [{name: paceline, env: [{name: PACELINE_HUB}]}]}", "PACELINE_HUB is paceline's own"),
        ("spec: {volumes: [x]}", "volumes[0] has no name"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(why)):
        manifests(job(template=str(path)))


def test_what_is_laid_over_what() -> None:
    base = {"a": 1, "env": [{"name": "x", "value": "1"}, {"name": "y", "value": "2"}], "args": ["a"], "gone": 1}
    over = {
        "env": [{"name": "y", "valueFrom": {"z": 1}}, {"name": "new"}],
        "args": ["b"],
        "gone": None,
        "deep": {"d": 2},
    }
    assert merged(base, over) == {
        "a": 1,
        "env": [{"name": "x", "value": "1"}, {"name": "y", "valueFrom": {"z": 1}}, {"name": "new"}],
        "args": ["b"],
        "deep": {"d": 2},
    }
    assert base["args"] == ["a"]
    volumes = [{"name": "run", "emptyDir": {}}]
    assert merged(volumes, [{"name": "run", "hostPath": {"path": "/x"}}], "volumes") == [
        {"name": "run", "hostPath": {"path": "/x"}}
    ]


def test_pods_have_few_rights_and_room_for_shared_memory() -> None:
    for pod in pods(job()).values():
        rights = pod["spec"]["securityContext"]
        assert rights["runAsNonRoot"] is True
        assert rights["runAsUser"] > 0
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container(pod)["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert named(pod["spec"]["volumes"])["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        assert named(container(pod)["volumeMounts"], "mountPath")["/dev/shm"]["name"] == "shm"


def test_only_those_that_train_have_a_gpu() -> None:
    asked = replace(job(kind="jobset"), gpus=1)

    def gpus(asked: Any) -> dict[str, str | None]:
        each = {role: container(pod)["resources"].get("limits", {}) for role, pod in pods(asked).items()}
        return {role: limits.get("nvidia.com/gpu") for role, limits in each.items()}

    assert gpus(asked) == {"chief": "1", "worker": "1", "server": None, "evaluator": None}
    assert gpus(replace(asked, evaluator_gpus=1))["evaluator"] == "1"
    assert gpus(job(kind="jobset", gpus="4")) == {"chief": "4", "worker": "4", "server": None, "evaluator": None}
    with pytest.raises(UsageError, match=r"evaluator and server would hold a GPU.*kind=jobset.*gpus=1"):
        manifests(replace(job(), gpus=1))
    assert gpus(replace(job(gpus="1"), gpus=1)) == {"all": "1"}
    assert gpus(replace(job(tasks=("chief", "worker:0")), gpus=1)) == {"all": "1"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_fails_often_does_not_fail_the_run(kind: str) -> None:
    last = manifests(job(kind=kind, restarts="2"))[-1]["spec"]
    if kind == "job":  # its index fails, the others go on, and the chief's success completes the job
        assert last["backoffLimitPerIndex"] == 2
        assert "maxFailedIndexes" not in last
        assert last["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
        return
    jobs = {one["name"]: one["template"]["spec"] for one in last["replicatedJobs"]}
    assert jobs["chief"]["backoffLimitPerIndex"] == 2
    assert {jobs[role]["backoffLimitPerIndex"] for role in ("worker", "server", "evaluator")} == {2**31 - 1}
    assert last["failurePolicy"] == {"maxRestarts": 0}


def test_only_pods_of_the_run_may_connect_and_only_to_its_ports() -> None:
    policy = found(job(), "NetworkPolicy")["spec"]
    own = {"podSelector": {"matchLabels": {"paceline/run": "mnist-mlp-async-001"}}}
    ports = [{"protocol": "TCP", "port": 7070, "endPort": 7089}]
    assert policy == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own], "ports": ports}]}
    asked = replace(job(), ports=(20000, 20040))
    assert found(asked, "NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["endPort"] == 20040
    told = found(asked, "ConfigMap")["data"]
    assert (told["PACELINE_PORTS"], told["PACELINE_HUB"].rpartition(":")[2]) == ("20000-20040", "20000")
    for collective, open_ in (("nccl", True), ("gloo", True), ("tcp", False)):
        own_ports = replace(job(), command=(*job().command, "--collective", collective))
        assert ("ports" not in found(own_ports, "NetworkPolicy")["spec"]["ingress"][0]) == open_
    assert "NetworkPolicy" not in [one["kind"] for one in manifests(job(network_policy="no"))]


def test_a_queue_of_kueue_is_named_on_the_job() -> None:
    for kind, name in zip(KINDS, ("Job", "JobSet"), strict=True):
        manifest = found(job(kind=kind, queue="team-a"), name)
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        assert manifest["spec"]["suspend"] is True
        assert "suspend" not in found(job(kind=kind), name)["spec"]


def test_own_code_is_where_the_command_looks_for_it(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("x = 1\n")
    asked = job(code=f"{tmp_path}/my_task.py")
    code = next(one for one in manifests(asked) if one["metadata"]["name"].endswith("-code"))
    assert code["data"] == {"my_task.py": "x = 1\n"}
    own = container(pods(asked)["all"])
    assert own["workingDir"] == "/code"
    typed = ("paceline", "train", f"{tmp_path}/my_task.py:task", "--hook", f"{tmp_path}/my_task.py:Mine:x=1", "lr=0.1")
    looked = container(pods(replace(asked, command=typed))["all"])["command"]
    assert looked == ["paceline", "train", "my_task.py:task", "--hook", "my_task.py:Mine:x=1", "lr=0.1"]
    assert named(own["volumeMounts"], "mountPath")["/code"] == {"name": "code", "mountPath": "/code", "readOnly": True}
    assert "    x = 1" in KubernetesLauncher().shown(asked)
    (tmp_path / "large.py").write_text("#" * (LARGEST + 1))
    (tmp_path / "odd name.py").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "my_task.py").write_text("")
    for words, why in (
        ("large.py", "more than a ConfigMap holds"),
        ("odd name.py", "no name that a ConfigMap takes"),
        ("my_task.py,other/my_task.py", "two files are called my_task.py"),
    ):
        with pytest.raises(UsageError, match=why):
            KubernetesLauncher().shown(job(code=",".join(f"{tmp_path}/{word}" for word in words.split(","))))


@pytest.mark.parametrize(
    ("kind", "volume", "refused"), [("job", "", True), ("jobset", "runs", True), ("job", "runs", False)]
)
def test_a_generated_certificate_needs_a_common_volume(kind: str, volume: str, refused: bool) -> None:
    asked = job(kind=kind, volume=volume)
    asked = replace(asked, command=(*asked.command, "--tls", "generated"))
    if not refused:
        manifests(asked)
        return
    with pytest.raises(UsageError, match="--tls generated needs a directory that all tasks see"):
        manifests(asked)


def test_the_image_is_made_of_what_is_there_and_does_not_run_as_root() -> None:
    root = Path(__file__).parents[2]
    text = (root / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)
    assert users == ["1000"]  # a number: Kubernetes cannot know of a name that it is not root's
    for words in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE):
        for source in words.split()[:-1]:
            assert (root / source).exists(), source
    assert not os.access(root / "Dockerfile", os.X_OK)
