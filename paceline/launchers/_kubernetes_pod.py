"""The pod of a role in Kubernetes: defaults that every cluster accepts, and the user's template merged over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.launchers._kubernetes_settings import KubernetesSettings
from paceline.launchers._kubernetes_template import CONTAINER, Manifest

if TYPE_CHECKING:
    from paceline.launcher import Job

CODE = "/code"  # where the user's own files are
USER = 1000  # not root; that of the Dockerfile


def pod(
    job: Job, settings: KubernetesSettings, role: str | None, *, volume: bool, tasks: list[str] | None = None
) -> Manifest:
    """The template of a role's pods; `role` None: of all tasks. `tasks`: those of the role; None: in the ConfigMap."""
    spec: Manifest = {
        "restartPolicy": "Never",  # the pod is replaced whole: its name and number stay
        "terminationGracePeriodSeconds": settings.grace,  # for the last checkpoint
        **{"automountServiceAccountToken": False, "enableServiceLinks": False},
        "securityContext": {
            **{"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER},
            **{"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, settings, role, volume, tasks)],
        "volumes": _volumes(settings, volume),
    }
    if settings.kind == "job":
        spec["subdomain"] = settings.name  # a JobSet sets its own
    if settings.options.get("service-account"):
        spec["serviceAccountName"] = settings.options["service-account"]
    labels = settings.labels | ({"paceline/role": role} if role else {})
    return settings.templated({"metadata": {"labels": labels}, "spec": spec}, role)


def _container(
    job: Job, settings: KubernetesSettings, role: str | None, volume: bool, tasks: list[str] | None
) -> Manifest:
    options = settings.options
    environment: list[Manifest] = [
        {
            "name": "PACELINE_SECRET",
            "valueFrom": {"secretKeyRef": {"name": f"{settings.name}-secret", "key": "secret"}},
        },
        {"name": "PACELINE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/tmp"},  # caches need a folder that any user can write to
    ]
    if tasks is not None:
        environment.append({"name": "PACELINE_TASKS", "value": ",".join(tasks)})
    mounts: list[Manifest] = [
        {"name": "run", "mountPath": str(job.directory)},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if options.get("volume") and volume:
        mounts[0]["subPath"] = settings.name  # several runs may share a claim
    container: Manifest = {
        **({"name": CONTAINER} | ({"image": options["image"]} if options.get("image") else {})),
        "command": settings.command(job.command),
        "envFrom": [{"configMapRef": {"name": f"{settings.name}-config"}}],
        "env": environment,
        "ports": [{"name": "hub", "containerPort": settings.ports.first, "protocol": "TCP"}],
        "resources": _resources(job, settings, role),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    if settings.code:
        mounts.append({"name": "code", "mountPath": CODE, "readOnly": True})
        container["workingDir"] = CODE  # so that file.py:task names the same file as on the submitting machine
    if options.get("image-pull-policy"):
        container["imagePullPolicy"] = options["image-pull-policy"]
    return container


def _volumes(settings: KubernetesSettings, volume: bool) -> list[Manifest]:
    claim = settings.options.get("volume") if volume else None
    found: list[Manifest] = [
        {"name": "run", **({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}})},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.options.get("shm", "1Gi")}},
    ]
    if settings.code:
        found.append({"name": "code", "configMap": {"name": f"{settings.name}-code"}})
    return found


def _resources(job: Job, settings: KubernetesSettings, role: str | None) -> Manifest:
    asked = {"cpu": settings.options.get("cpu", str(job.threads))}
    limits = {}
    if settings.options.get("memory"):
        asked["memory"] = limits["memory"] = settings.options["memory"]
    gpus = settings.gpus(job, role)
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    return {"requests": asked, **({"limits": limits} if limits else {})}
