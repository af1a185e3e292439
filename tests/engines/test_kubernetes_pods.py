"""What the manifests tell each pod, told to plain processes of this machine: they find their tasks and train.

There is no kubelet here; the name of the chief's pod, which only a cluster resolves, is replaced by an address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from beds.ports import free_range
from shells import Shells, shells, trained


def test_pods_of_an_indexed_job(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        told = manifests(start)
        count = told["Job"]["spec"]["completions"]
        assert count == 3
        run_pods(start, told, told["Job"]["spec"]["template"], count)
        start.all_ended()
        trained(tmp_path / "run")


def test_pods_of_a_jobset(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        told = manifests(start, "--engine", "kind=jobset")
        for job in told["JobSet"]["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            run_pods(start, told, spec["template"], spec["completions"], job["name"])
        start.all_ended()
        trained(tmp_path / "run")


def manifests(start: Shells, *words: str) -> dict[str, dict[str, Any]]:
    """What --dry-run prints, by kind, with the hub at a port of this machine."""
    asked = ("digits-mlp", "--scheme", "async", "lr=0.2", "--workers", "2", "--steps", "400", "--no-summaries")
    engine = ("--on", "kubernetes", "--dry-run", "--engine", "image=example.org/paceline:1", *words)
    shown = start("shown", "train", *asked, *engine, "--dir", str(start.folder / "run"))
    assert shown.ended() == 0, shown.err
    told = {one["kind"]: one for one in yaml.safe_load_all(shown.out)}
    hub = told["ConfigMap"]["data"]["PACELINE_HUB"]
    assert hub.startswith("run-")
    ports = free_range(20)  # a pod's are always free; those of this machine may not be
    told["ConfigMap"]["data"] |= {"PACELINE_HUB": f"127.0.0.1:{ports.first}", "PACELINE_PORTS": str(ports)}
    return told


def run_pods(start: Shells, told: dict[str, Any], template: dict[str, Any], count: int, name: str = "pod") -> None:
    container = template["spec"]["containers"][0]
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    environment = told["ConfigMap"]["data"] | own | {"PACELINE_SECRET": "ab" * 32, "PACELINE_ADDRESS": "127.0.0.1"}
    assert {one["name"] for one in container["env"]} <= environment.keys()
    for index in range(count):
        start(f"{name}-{index}", *container["command"][1:], **environment, JOB_COMPLETION_INDEX=str(index))
