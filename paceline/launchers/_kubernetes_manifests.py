"""The manifests of a run under Kubernetes: an Indexed Job or a JobSet, service, config, secret and NetworkPolicy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.launchers._kubernetes_pod import pod
from paceline.launchers._kubernetes_settings import KubernetesSettings
from paceline.launchers._kubernetes_template import CONTAINER, Manifest

if TYPE_CHECKING:
    from paceline.launcher import Job

ASKED_TO_END = (130, 143)  # exit codes after SIGINT, or an interrupted run; after SIGTERM
ENDLESS = 2**31 - 1  # replacements of one pod: Kubernetes lengthens the pause between two
QUEUE = "kueue.x-k8s.io/queue-name"


def manifests(job: Job) -> list[Manifest]:
    """All manifests except the secret, in the order in which to apply them."""
    settings = KubernetesSettings.of(job)
    found = [_config(job, settings)]
    found += [_code(settings)] if settings.code else []
    found += [_policy(job, settings)] if settings.policy else []
    if settings.kind == "jobset":
        return [*found, _jobset(job, settings)]
    return [*found, _service(settings), _job(job, settings)]


def resources(settings: KubernetesSettings) -> list[tuple[str, str]]:
    """Kind and name of each resource of a run except the job, in the order in which to delete them."""
    found = [("service", settings.name)] if settings.kind == "job" else []
    found += [("networkpolicy", settings.name)] if settings.policy else []
    found += [("configmap", f"{settings.name}-code")] if settings.code else []
    return [*found, ("configmap", f"{settings.name}-config"), ("secret", f"{settings.name}-secret")]


def secret(job: Job, settings: KubernetesSettings) -> Manifest:
    metadata = settings.metadata(f"{settings.name}-secret")
    return {
        **{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"},
        "stringData": {"secret": job.secret.hex()},
    }


def _config(job: Job, settings: KubernetesSettings) -> Manifest:
    chief = job.tasks.index("chief")
    host = f"{settings.name}-chief-0-0" if settings.kind == "jobset" else f"{settings.name}-{chief}"
    told = {
        "PACELINE_CLUSTER": job.cluster(),
        "PACELINE_HUB": f"{host}.{settings.name}:{settings.ports.first}",
        "PACELINE_PORTS": str(settings.ports),
    }
    if settings.kind == "job":
        told["PACELINE_TASKS"] = ",".join(job.tasks)
    return {
        **{"apiVersion": "v1", "kind": "ConfigMap", "metadata": settings.metadata(f"{settings.name}-config")},
        "data": told,
    }


def _code(settings: KubernetesSettings) -> Manifest:
    """The user's own files."""
    return {
        **{"apiVersion": "v1", "kind": "ConfigMap", "metadata": settings.metadata(f"{settings.name}-code")},
        "data": dict(settings.code),
    }


def _policy(job: Job, settings: KubernetesSettings) -> Manifest:
    """Only pods of this run may connect to its pods, and only where paceline listens."""
    own = {"podSelector": {"matchLabels": {"paceline/run": settings.name}}}
    listens = [{"protocol": "TCP", "port": settings.ports.first, "endPort": settings.ports.last}]
    chosen = job.option("--collective") in ("gloo", "nccl")  # which choose their own ports
    allowed = {"from": [own], **({} if chosen else {"ports": listens})}
    return {
        **{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": settings.metadata(settings.name)},
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [allowed]},
    }


def _service(settings: KubernetesSettings) -> Manifest:
    """A headless service: it gives the pods host names, also before they are ready."""
    return {
        **{"apiVersion": "v1", "kind": "Service", "metadata": settings.metadata(settings.name)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": settings.name},
            "ports": [{"name": "hub", "port": settings.ports.first, "protocol": "TCP"}],
        },
    }


def _queued(settings: KubernetesSettings) -> tuple[Manifest, Manifest]:
    """Metadata of a job, and additions to its spec: with Kueue it is suspended until there is room for all pods."""
    metadata = settings.metadata(settings.name)
    queue = settings.options.get("queue")
    if queue is None:
        return metadata, {}
    return metadata | {"labels": metadata["labels"] | {QUEUE: queue}}, {"suspend": True}


def _job(job: Job, settings: KubernetesSettings) -> Manifest:
    metadata, waits = _queued(settings)
    return {
        **{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata},
        "spec": {
            **waits,
            **_indexed(len(job.tasks), settings.restarts),
            # the run ends with the chief: a pod replaced at the last moment finds no hub, and the run has continued
            # without a worker that failed too often
            "successPolicy": {"rules": [{"succeededIndexes": str(job.tasks.index("chief"))}]},
            "ttlSecondsAfterFinished": settings.ttl,
            "template": pod(job, settings, None, volume=True),
        },
    }


def _jobset(job: Job, settings: KubernetesSettings) -> Manifest:
    """A job for each role. Only the chief's pod mounts the volume, so a ReadWriteOnce volume suffices."""
    roles: dict[str, list[str]] = {}
    for task in job.tasks:
        roles.setdefault(task.partition(":")[0], []).append(task)
    jobs = []
    for role, tasks in roles.items():
        chief = role == "chief"
        template = pod(job, settings, role, volume=chief, tasks=tasks)
        # only the chief reports a wrong request by 2; others end with 2 also while their predecessor is not known dead
        hopeless = (2, 3) if chief else (3,)
        # a failed job would fail the set: workers and servers, which a run can replace, are restarted without limit
        limit = settings.restarts if chief else ENDLESS
        spec = {**_indexed(len(tasks), limit, hopeless), "template": template}
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    metadata, waits = _queued(settings)
    return {
        **{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata},
        "spec": {
            **waits,
            "network": {"enableDNSHostnames": True, "subdomain": settings.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
            "failurePolicy": {"maxRestarts": 0},  # the chief's own job counts its restarts
            "ttlSecondsAfterFinished": settings.ttl,
            "replicatedJobs": jobs,
        },
    }


def _indexed(count: int, restarts: int, hopeless: tuple[int, ...] = (3,)) -> Manifest:
    """Numbered pods, each replaced when it is killed. `hopeless`: exit codes with which a replacement would end, too.
    A pod that has failed more than `restarts` times is not replaced again; the others continue."""
    return {
        **{"completions": count, "parallelism": count, "completionMode": "Indexed"},
        "backoffLimitPerIndex": restarts,
        "podFailurePolicy": {
            "rules": [
                # a drained or lost node does not count as a failure of the pod
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # nor does a task that was asked to end, or whose run was: it is replaced
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
