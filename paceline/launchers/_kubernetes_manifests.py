"""The manifests of a run: an Indexed Job or a JobSet with its pods, service, config, secret and NetworkPolicy."""

from __future__ import annotations

from typing import Any

from paceline.launchers._kubernetes_settings import KubernetesSettings
from paceline.launchers._kubernetes_template import CONTAINER, Manifest

ASKED_TO_END = (130, 143)  # exit codes after SIGINT, or an interrupted run; after SIGTERM
ENDLESS = 2**31 - 1  # replacements of one pod: Kubernetes lengthens the pause between two
QUEUE = "kueue.x-k8s.io/queue-name"
CODE = "/code"  # where the user's own files are
USER = 1000  # not root; that of the Dockerfile


def manifests(settings: KubernetesSettings) -> list[Manifest]:
    """All manifests except the secret, in the order in which to apply them; the job is the last one."""
    found = [_config(settings)]
    if settings.code:
        found.append(_manifest(settings, "v1 ConfigMap", "-code", data=dict(settings.code)))
    if settings.policy:
        found.append(_policy(settings))
    return [*found, _jobset(settings)] if settings.kind == "jobset" else [*found, _service(settings), _job(settings)]


def secret(settings: KubernetesSettings) -> Manifest:
    text = {"secret": settings.job.secret.hex()}
    return _manifest(settings, "v1 Secret", "-secret", type="Opaque", stringData=text)


def _manifest(settings: KubernetesSettings, kind: str, ending: str = "", **rest: Any) -> Manifest:
    """A manifest of the run; `kind` as "VERSION KIND". Its name ends with `ending`."""
    version, _, name = kind.partition(" ")
    return {"apiVersion": version, "kind": name, "metadata": settings.metadata(settings.name + ending), **rest}


def _config(settings: KubernetesSettings) -> Manifest:
    tasks = settings.job.tasks
    host = f"{settings.name}-chief-0-0" if settings.kind == "jobset" else f"{settings.name}-{tasks.index('chief')}"
    told = {
        "PACELINE_CLUSTER": settings.job.cluster(),
        "PACELINE_HUB": f"{host}.{settings.name}:{settings.ports.first}",
        "PACELINE_PORTS": str(settings.ports),
    }
    if settings.kind == "job":
        told["PACELINE_TASKS"] = ",".join(tasks)
    return _manifest(settings, "v1 ConfigMap", "-config", data=told)


def _policy(settings: KubernetesSettings) -> Manifest:
    """Only pods of this run may connect to its pods, and only where paceline listens."""
    own = {"podSelector": {"matchLabels": {"paceline/run": settings.name}}}
    listens = [{"protocol": "TCP", "port": settings.ports.first, "endPort": settings.ports.last}]
    chosen = settings.job.option("--collective") in ("gloo", "nccl")  # which choose their own ports
    allowed = {"from": [own], **({} if chosen else {"ports": listens})}
    spec = {**own, "policyTypes": ["Ingress"], "ingress": [allowed]}
    return _manifest(settings, "networking.k8s.io/v1 NetworkPolicy", spec=spec)


def _service(settings: KubernetesSettings) -> Manifest:
    """A headless service: it gives the pods host names, also before they are ready."""
    spec = {
        **{"clusterIP": "None", "publishNotReadyAddresses": True},
        "selector": {"batch.kubernetes.io/job-name": settings.name},
        "ports": [{"name": "hub", "port": settings.ports.first, "protocol": "TCP"}],
    }
    return _manifest(settings, "v1 Service", spec=spec)


def _queued(settings: KubernetesSettings, kind: str, spec: Manifest) -> Manifest:
    """A job that Kueue, if it is asked for, suspends until there is room for all pods."""
    found = _manifest(settings, kind, spec=spec)
    if queue := settings.options.get("queue"):
        found["metadata"]["labels"][QUEUE] = queue
        found["spec"] = {"suspend": True, **spec}
    return found


def _job(settings: KubernetesSettings) -> Manifest:
    tasks = settings.job.tasks
    spec = {
        **_indexed(len(tasks), settings.restarts),
        # the run ends with the chief: a pod replaced at the last moment finds no hub, and the run has continued
        # without a worker that failed too often
        "successPolicy": {"rules": [{"succeededIndexes": str(tasks.index("chief"))}]},
        "ttlSecondsAfterFinished": settings.ttl,
        "template": _pod(settings, None, volume=True),
    }
    return _queued(settings, "batch/v1 Job", spec)


def _jobset(settings: KubernetesSettings) -> Manifest:
    """A job for each role. Only the chief's pod mounts the volume, so a ReadWriteOnce volume suffices."""
    roles: dict[str, list[str]] = {}
    for task in settings.job.tasks:
        roles.setdefault(task.partition(":")[0], []).append(task)
    jobs = []
    for role, tasks in roles.items():
        chief = role == "chief"
        # only the chief reports a wrong request by 2; others end with 2 also while their predecessor is not known dead
        hopeless = (2, 3) if chief else (3,)
        # a failed job would fail the set: workers and servers, which a run can replace, are restarted without limit
        limit = settings.restarts if chief else ENDLESS
        template = _pod(settings, role, volume=chief, tasks=tasks)
        spec = {**_indexed(len(tasks), limit, hopeless), "template": template}
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    whole = {
        "network": {"enableDNSHostnames": True, "subdomain": settings.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
        "failurePolicy": {"maxRestarts": 0},  # the chief's own job counts its restarts
        "ttlSecondsAfterFinished": settings.ttl,
        "replicatedJobs": jobs,
    }
    return _queued(settings, "jobset.x-k8s.io/v1alpha2 JobSet", whole)


def _indexed(count: int, restarts: int, hopeless: tuple[int, ...] = (3,)) -> Manifest:
    """Numbered pods, each replaced when it is killed. `hopeless`: exit codes with which a replacement would end, too.
    A pod that has failed more than `restarts` times is not replaced again; the others continue."""
    rules = [
        # a drained or lost node does not count as a failure of the pod
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # nor does a task that was asked to end, or whose run was: it is replaced
        {"action": "Ignore", "onExitCodes": _exit_codes(ASKED_TO_END)},
        {"action": "FailJob", "onExitCodes": _exit_codes(hopeless)},
    ]
    return {
        **{"completions": count, "parallelism": count, "completionMode": "Indexed"},
        **{"backoffLimitPerIndex": restarts, "podFailurePolicy": {"rules": rules}},
    }


def _exit_codes(codes: tuple[int, ...]) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _pod(settings: KubernetesSettings, role: str | None, volume: bool, tasks: list[str] | None = None) -> Manifest:
    """The template of a role's pods; `role` None: of all tasks. `tasks`: those of the role; None: in the ConfigMap.
    The user's template is merged over these defaults, which every cluster accepts."""
    spec: Manifest = {
        "restartPolicy": "Never",  # the pod is replaced whole: its name and number stay
        "terminationGracePeriodSeconds": settings.grace,  # for the last checkpoint
        **{"automountServiceAccountToken": False, "enableServiceLinks": False},
        "securityContext": {
            **{"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER},
            **{"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(settings, role, volume, tasks)],
        "volumes": _volumes(settings, volume),
    }
    if settings.kind == "job":
        spec["subdomain"] = settings.name  # a JobSet sets its own
    if settings.options.get("service-account"):
        spec["serviceAccountName"] = settings.options["service-account"]
    labels = settings.labels | ({"paceline/role": role} if role else {})
    return settings.templated({"metadata": {"labels": labels}, "spec": spec}, role)


def _container(settings: KubernetesSettings, role: str | None, volume: bool, tasks: list[str] | None) -> Manifest:
    options, proof = settings.options, {"name": f"{settings.name}-secret", "key": "secret"}
    environment: list[Manifest] = [
        {"name": "PACELINE_SECRET", "valueFrom": {"secretKeyRef": proof}},
        {"name": "PACELINE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/tmp"},  # caches need a folder that any user can write to
    ]
    if tasks is not None:
        environment.append({"name": "PACELINE_TASKS", "value": ",".join(tasks)})
    claim = {"subPath": settings.name} if options.get("volume") and volume else {}  # several runs may share a claim
    mounts: list[Manifest] = [
        {"name": "run", "mountPath": str(settings.job.directory), **claim},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    container: Manifest = {
        **({"name": CONTAINER} | ({"image": options["image"]} if options.get("image") else {})),
        "command": settings.command(),
        "envFrom": [{"configMapRef": {"name": f"{settings.name}-config"}}],
        "env": environment,
        "ports": [{"name": "hub", "containerPort": settings.ports.first, "protocol": "TCP"}],
        "resources": _resources(settings, role),
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


def _resources(settings: KubernetesSettings, role: str | None) -> Manifest:
    asked = {"cpu": settings.options.get("cpu", str(settings.job.threads))}
    limits = {}
    if settings.options.get("memory"):
        asked["memory"] = limits["memory"] = settings.options["memory"]
    if gpus := settings.gpus(role):
        limits["nvidia.com/gpu"] = str(gpus)
    return {"requests": asked, **({"limits": limits} if limits else {})}
