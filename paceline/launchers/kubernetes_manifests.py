"""The manifests of a run under Kubernetes: an Indexed Job or a JobSet, its headless service, its config, its secret."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from paceline.launchers.job import Job

KEYS = (
    *("image", "namespace", "kind", "memory", "cpu", "gpus", "volume", "service-account", "image-pull-policy", "ttl"),
    *("restarts", "grace"),
)
KINDS = ("job", "jobset")
PULL = ("Always", "IfNotPresent", "Never")
PORT = 7070
CONTAINER = "paceline"

Manifest = dict[str, Any]

ASKED_TO_END = (130, 143)  # exit codes after SIGINT, or an interrupted run; after SIGTERM


@dataclass(frozen=True)
class Settings:
    """What `--engine` says, and the names that follow from it."""

    name: str
    image: str
    kind: str
    options: dict[str, str]

    @classmethod
    def of(cls, job: Job) -> Settings:
        job.refuse_unknown(KEYS)
        options = job.options
        if not options.get("image"):
            raise UsageError("--on kubernetes needs --engine image=…: an image in which paceline is installed")
        kind = options.get("kind", "job").lower()
        if kind not in KINDS:
            raise UnknownName("kind of a Kubernetes run", kind, KINDS)
        if options.get("image-pull-policy", "Always") not in PULL:
            raise UnknownName("image-pull-policy", options["image-pull-policy"], PULL)
        for key in ("gpus", "ttl", "restarts", "grace"):
            if key in options and not (options[key].isascii() and options[key].isdigit()):
                raise UsageError(f"--engine {key}={options[key]}: a whole number is needed")
        for key in ("cpu", "memory"):
            if key in options and not re.fullmatch(r"\d+(\.\d+)?([mkKMGTPE]|[KMGTPE]i)?", options[key]):
                raise UsageError(f"--engine {key}={options[key]}: a quantity of Kubernetes is needed (2, 500m, 4Gi)")
        return cls(_name(job.name, len(job.tasks)), options["image"], kind, options)

    def number(self, key: str, default: int) -> int:
        return int(self.options.get(key, default))

    def arguments(self, *words: str) -> list[str]:
        """kubectl, in the namespace that was asked for."""
        namespace = self.options.get("namespace")
        return ["kubectl", *(["--namespace", namespace] if namespace else []), *words]

    def metadata(self, name: str) -> Manifest:
        namespace = {"namespace": self.options["namespace"]} if self.options.get("namespace") else {}
        return {"name": name, **namespace, "labels": {"app.kubernetes.io/name": "paceline", "paceline/run": self.name}}


def manifests(job: Job) -> list[Manifest]:
    """Everything but the secret, in the order in which it is to be applied."""
    settings = Settings.of(job)
    if settings.kind == "jobset":
        return [_config(job, settings), _jobset(job, settings)]
    return [_config(job, settings), _service(settings), _job(job, settings)]


def secret(job: Job, settings: Settings) -> Manifest:
    metadata = settings.metadata(f"{settings.name}-secret")
    return {
        **{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"},
        "stringData": {"secret": job.secret.hex()},
    }


def _config(job: Job, settings: Settings) -> Manifest:
    chief = job.tasks.index("chief")
    pod = f"{settings.name}-chief-0-0" if settings.kind == "jobset" else f"{settings.name}-{chief}"
    told = {"PACELINE_CLUSTER": job.cluster(), "PACELINE_HUB": f"{pod}.{settings.name}:{PORT}"}
    if settings.kind == "job":
        told["PACELINE_TASKS"] = ",".join(job.tasks)
    return {
        **{"apiVersion": "v1", "kind": "ConfigMap", "metadata": settings.metadata(f"{settings.name}-config")},
        "data": told,
    }


def _service(settings: Settings) -> Manifest:
    """Without an address of its own: it gives the pods their names. They are needed before anybody is ready."""
    return {
        **{"apiVersion": "v1", "kind": "Service", "metadata": settings.metadata(settings.name)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": settings.name},
            "ports": [{"name": "hub", "port": PORT, "protocol": "TCP"}],
        },
    }


def _job(job: Job, settings: Settings) -> Manifest:
    kept = {"ttlSecondsAfterFinished": settings.number("ttl", 86_400)}
    return {
        **{"apiVersion": "batch/v1", "kind": "Job", "metadata": settings.metadata(settings.name)},
        "spec": {
            **_indexed(settings, len(job.tasks)),
            # the chief's end is the run's: a pod that was replaced at the last moment has nobody to meet
            "successPolicy": {"rules": [{"succeededIndexes": str(job.tasks.index("chief"))}]},
            **kept,
            "template": _pod(job, settings, volume=True),
        },
    }


def _jobset(job: Job, settings: Settings) -> Manifest:
    """A job for each role. Only the chief's pod holds the volume, so one that a single node can mount will do."""
    roles: dict[str, list[str]] = {}
    for task in job.tasks:
        roles.setdefault(task.partition(":")[0], []).append(task)
    jobs = []
    for role, tasks in roles.items():
        template = _pod(job, settings, volume=role == "chief", tasks=tasks)
        # a wrong request is the chief's to find; others end with 2 also where a predecessor is not yet known dead
        hopeless = (2, 3) if role == "chief" else (3,)
        spec = {**_indexed(settings, len(tasks), hopeless), "template": template}
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    return {
        **{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": settings.metadata(settings.name)},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": settings.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
            "failurePolicy": {"maxRestarts": settings.number("restarts", 3)},
            "ttlSecondsAfterFinished": settings.number("ttl", 86_400),
            "replicatedJobs": jobs,
        },
    }


def _indexed(settings: Settings, count: int, hopeless: tuple[int, ...] = (3,)) -> Manifest:
    """Pods with numbers, each replaced when it is killed. `hopeless`: exit codes with which the next would end too."""
    return {
        **{"completions": count, "parallelism": count, "completionMode": "Indexed"},
        "backoffLimitPerIndex": settings.number("restarts", 3),
        "maxFailedIndexes": 0,
        "podFailurePolicy": {
            "rules": [
                # a drained or lost node is nobody's fault and does not count
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # nor does a task that was asked to leave, or whose run was: another takes its place
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(ASKED_TO_END)},
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(hopeless)},
                },
            ]
        },
    }


def _pod(job: Job, settings: Settings, volume: bool, tasks: list[str] | None = None) -> Manifest:
    options = settings.options
    environment: list[Manifest] = [
        {
            "name": "PACELINE_SECRET",
            "valueFrom": {"secretKeyRef": {"name": f"{settings.name}-secret", "key": "secret"}},
        },
        {"name": "PACELINE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    if tasks is not None:  # else all of them, of the config
        environment.append({"name": "PACELINE_TASKS", "value": ",".join(tasks)})
    container: Manifest = {
        **{"name": CONTAINER, "image": settings.image, "command": list(job.command)},
        "envFrom": [{"configMapRef": {"name": f"{settings.name}-config"}}],
        "env": environment,
        "ports": [{"name": "hub", "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(job, settings),
        "securityContext": {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumeMounts": [{"name": "run", "mountPath": str(job.directory)}],
    }
    if options.get("volume") and volume:
        container["volumeMounts"][0]["subPath"] = settings.name  # several runs may share a claim
    if options.get("image-pull-policy"):
        container["imagePullPolicy"] = options["image-pull-policy"]
    claim = {"persistentVolumeClaim": {"claimName": options["volume"]}} if options.get("volume") and volume else None
    spec: Manifest = {
        "restartPolicy": "Never",  # the pod is replaced whole: its name and number stay
        "subdomain": settings.name,
        "terminationGracePeriodSeconds": settings.number("grace", 120),  # for the last checkpoint
        **{"automountServiceAccountToken": False, "enableServiceLinks": False},
        "containers": [container],
        "volumes": [{"name": "run", **(claim or {"emptyDir": {}})}],
    }
    if settings.kind == "jobset":
        del spec["subdomain"]  # the JobSet's own
    if options.get("service-account"):
        spec["serviceAccountName"] = options["service-account"]
    return {"metadata": {"labels": settings.metadata("")["labels"]}, "spec": spec}


def _resources(job: Job, settings: Settings) -> Manifest:
    asked = {"cpu": settings.options.get("cpu", str(job.threads))}
    limits = {}
    if settings.options.get("memory"):
        asked["memory"] = limits["memory"] = settings.options["memory"]
    gpus = settings.number("gpus", job.gpus)
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    return {"requests": asked, **({"limits": limits} if limits else {})}


def _name(text: str, tasks: int) -> str:
    """A name that may stand in a host name: NAME-chief-0-INDEX and NAME-secret have at most 63 letters."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    room = 63 - len(f"-evaluator-0-{tasks}") - len("-xxxxx")
    if not name or not name[0].isalpha():
        name = f"run-{name}".strip("-")
    return name[:room].rstrip("-")
