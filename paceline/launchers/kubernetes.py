"""`--on kubernetes`: manifests of an Indexed Job, or of a JobSet, with its headless service, config and secret.

Kubernetes numbers the pods and gives each a name that stays: pod i is NAME-i.NAME, on whichever node it runs and
however often it has been replaced. So the hub's address is known beforehand, and the number says which task a pod is.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time

import yaml

from paceline.errors import RunError, UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers._kubernetes_manifests import manifests, secret
from paceline.launchers._kubernetes_settings import KEYS, KubernetesSettings
from paceline.launchers._kubernetes_template import CONTAINER, Manifest
from paceline.signals import Interrupted

POLL = 2.0  # seconds between two looks at the job
GIVEN_UP = "the chief's pod is not replaced any more"
LATE = 15  # looks that a job may stay unseen after it was applied


class KubernetesLauncher(Launcher):
    """An Indexed Job or a JobSet whose pods run the tasks, applied with kubectl."""

    name = "kubernetes"
    keys = KEYS
    example = {"image": "example.org/paceline:1"}

    def launch(self, job: Job) -> int:
        settings = KubernetesSettings(job)
        if shutil.which("kubectl") is None:
            raise UsageError(
                "kubectl is not installed; install it, or apply the manifests elsewhere: --dry-run > job.yaml"
            )
        made, kind, done = manifests(settings), settings.kind, False
        try:
            # not `apply`: that would keep a copy of the secret in an annotation
            _kubectl(settings, "delete", "secret", f"{settings.name}-secret", "--ignore-not-found")
            _kubectl(settings, "create", "-f", "-", text=json.dumps(secret(settings)))
            _kubectl(settings, "apply", "-f", "-", text=self.shown(job))
            job.say(f"kubernetes: {kind}/{settings.name} with {len(job.tasks)} pods")
            code, done = _followed(settings)
            return code
        except (KeyboardInterrupt, Interrupted):
            job.say(f"stopping: {kind}/{settings.name} is deleted; the chief writes a last checkpoint")
            return 130
        finally:
            # a job that has ended by itself is kept for `ttl` seconds
            for one in [*reversed(made[:-1] if done else made), secret(settings)]:
                words = (one["kind"].lower(), one["metadata"]["name"], "--ignore-not-found", "--wait=true")
                _kubectl(settings, "delete", *words, strict=False)

    def shown(self, job: Job) -> str:
        """The manifests as YAML. The secret must exist before them: the first lines say how to make it."""
        settings = KubernetesSettings(job)
        name = f"{settings.name}-secret"
        make = shlex.join(settings.arguments("create", "secret", "generic", name, "--from-file=secret=/dev/stdin"))
        lines = [
            "# The shared secret is not in here. Make it first, and delete it with the job:",
            f"#   openssl rand -hex 32 | tr -d '\\n' | {make}",
        ]
        if not settings.options.get("volume"):
            lines.append("# Without --engine volume=CLAIM checkpoints go when the chief's pod goes.")
        form = {"sort_keys": False, "allow_unicode": True, "width": 120, "explicit_start": True}
        return "\n".join([*lines, str(yaml.dump_all(manifests(settings), Dumper=_Dumper, **form))])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's dumper with text of several lines as blocks, and without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _followed(settings: KubernetesSettings) -> tuple[int, bool]:
    """Follow the job until it is complete or failed, or can only fail: the exit code, and whether the job has ended by
    itself. After the log of a chief's pod comes that of its replacement."""
    index = settings.job.tasks.index("chief")
    chief = f"batch.kubernetes.io/job-name={settings.name},batch.kubernetes.io/job-completion-index={index}"
    if settings.kind == "jobset":
        chief = f"jobset.sigs.k8s.io/jobset-name={settings.name},jobset.sigs.k8s.io/replicatedjob-name=chief"
    seen: set[str] = set()
    unseen = 0
    while True:
        state = _state(settings)
        unseen = unseen + 1 if state is None else 0
        if unseen > LATE:
            raise RunError(f"{settings.kind}/{settings.name} no longer exists: it was deleted")
        for pod in _pods(settings, chief):
            name, phase = pod["metadata"]["name"], pod.get("status", {}).get("phase")
            if name not in seen and phase in ("Running", "Succeeded", "Failed"):
                seen.add(name)
                if len(seen) > 1:
                    settings.job.say(f"the chief's pod was replaced: {name}")
                subprocess.run(settings.arguments("logs", "--follow", name, "--container", CONTAINER), check=False)
        if state in ("Complete", "Completed"):
            return 0, True
        if state in ("Failed", GIVEN_UP):
            return _exit_code(_pods(settings, chief)), state == "Failed"
        time.sleep(POLL)


def _state(settings: KubernetesSettings) -> str | None:
    """The condition with which a job has ended; "" while it runs; None if it does not exist. A job whose chief is no
    longer replaced has only pods left that wait for a chief."""
    found = _kubectl(settings, "get", settings.kind, settings.name, "--ignore-not-found", "--output", "json")
    if not found.strip():
        return None
    ends = {"Complete", "Completed", "Failed"}
    status = json.loads(found).get("status", {})
    over = [one["type"] for one in status.get("conditions", []) if one["type"] in ends and one["status"] == "True"]
    if not over and _names(status.get("failedIndexes", ""), settings.job.tasks.index("chief")):
        return GIVEN_UP
    return over[0] if over else ""


def _names(indexes: str, number: int) -> bool:
    """Whether a list of ranges such as 0,3-5 contains this number."""
    ranges = [part.partition("-") for part in indexes.split(",") if part]
    return any(int(first) <= number <= int(last or first) for first, _, last in ranges)


def _pods(settings: KubernetesSettings, selector: str) -> list[Manifest]:
    found = json.loads(_kubectl(settings, "get", "pods", "--selector", selector, "--output", "json"))
    return sorted(found["items"], key=lambda pod: str(pod["metadata"].get("creationTimestamp")))


def _exit_code(pods: list[Manifest]) -> int:
    """The exit code of the newest chief that has one; else 1."""
    for pod in reversed(pods):
        for container in pod.get("status", {}).get("containerStatuses", []):
            code = container.get("state", {}).get("terminated", {}).get("exitCode")
            if code:
                return code if code < 128 or code == 130 else 1
    return 1


def _kubectl(settings: KubernetesSettings, *words: str, text: str | None = None, strict: bool = True) -> str:
    done = subprocess.run(settings.arguments(*words), input=text, capture_output=True, text=True, check=False)
    if done.returncode and strict:
        raise RunError(f"kubectl {' '.join(words)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
