"""The values of `--engine` for `--on kubernetes`, checked before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from paceline.config.endpoint import Ports
from paceline.config.role_names import KINDS as ROLES
from paceline.errors import UnknownName, UsageError
from paceline.launcher import Job
from paceline.launchers._kubernetes_template import CONTAINER, Manifest, merged, read

KEYS = {
    "image": "an image that contains paceline and the data set; needed, here or in the template",
    "kind": "job: one Indexed Job for all tasks; jobset: a job for each role; default: job",
    "namespace": "default: kubectl's",
    "memory": "of each pod, request and limit, such as 4Gi; default: none",
    "cpu": "of each pod, such as 500m; default: --threads",
    "gpus": "nvidia.com/gpu of chief and workers; default: 1 with --device cuda",
    "volume": "a PersistentVolumeClaim, mounted at the run directory",
    "service-account": "default: the cluster's",
    "image-pull-policy": "Always, IfNotPresent or Never; default: the cluster's",
    "ttl": "seconds that an ended job is kept; default: 86400",
    "restarts": "replacements of the chief's pod after failures of its own; default: 3",
    "grace": "seconds between SIGTERM and SIGKILL; default: 120",
    "shm": "size of /dev/shm; default: 1Gi",
    "queue": "a LocalQueue of Kueue, which admits the job",
    "network-policy": "only pods of this run may connect to its pods, yes or no; default: yes",
    "code": "files of your own, mounted at /code: my_task.py,my_hook.py",
    "template": "a file with a pod template, merged over every pod",
    **{f"template-{role}": f"the same for the {role}, over template; with kind=jobset" for role in ROLES},
}
KINDS = ("job", "jobset")
PULL = ("Always", "IfNotPresent", "Never")
PORTS = Ports(7070, 7089)  # a pod has its own address: they are free
LARGEST = 1_000_000  # bytes of a ConfigMap, a little less than what a cluster's store takes


class KubernetesSettings:
    """The settings of one run, and the names that follow from them."""

    def __init__(self, job: Job) -> None:
        self.job, self.options = job, job.options
        self.kind = job.options.get("kind", "job").lower()
        if self.kind not in KINDS:
            raise UnknownName("kind of a Kubernetes run", self.kind, KINDS)
        _check_values(job.options)
        keys = {"": "template", **{role: f"template-{role}" for role in ROLES}}
        self._templates = {role: read(Path(job.options[key]), key) for role, key in keys.items() if key in job.options}
        self.name = _name(job.name, len(job.tasks))
        self.ports = Ports(*job.ports) if job.ports else PORTS
        self.policy = job.truth("network-policy", True)
        self.restarts, self.grace = job.number("restarts", 3), job.number("grace", 120)
        self.ttl = job.number("ttl", 86_400)
        self.code = _code(job.options.get("code", ""))  # the user's own files: name and text
        self.gpus(None)  # refuses what is no number
        self._check_roles(job)

    def _check_roles(self, job: Job) -> None:
        own = sorted(role for role in self._templates if role)
        if own and self.kind == "job":
            raise UsageError(f"--engine template-{own[0]}=: the pods of a Job are all alike; use --engine kind=jobset")
        idle = sorted({task.partition(":")[0] for task in job.tasks if not job.gpus_of(task)})
        if job.gpus and idle and self.kind == "job" and "gpus" not in self.options:
            raise UsageError(
                f"the pods of a Job are all alike: {' and '.join(idle)} would hold a GPU without use. Use --engine "
                "kind=jobset (which needs the JobSet controller), or allow it with --engine gpus=1"
            )
        if job.option("--tls") == "generated" and (self.kind == "jobset" or not self.options.get("volume")):
            raise UsageError(
                "--tls generated needs a directory that all tasks see: use kind=job and --engine volume=CLAIM, or "
                "give certificate and key by a mounted secret (--tls CERTIFICATE,KEY and --engine template=…)"
            )
        for role in {task.partition(":")[0] for task in job.tasks}:
            if not self.options.get("image") and not self._image(role):
                raise UsageError("--on kubernetes needs --engine image=…: an image that contains paceline")

    def _image(self, role: str) -> str | None:
        whole = self.templated({"spec": {"containers": [{"name": CONTAINER}]}}, role)
        return next((one.get("image") for one in whole["spec"]["containers"] if one["name"] == CONTAINER), None)

    def command(self) -> list[str]:
        """The tasks' command with the paths of the user's own files as in the pods: tasks/my.py:task is my.py:task."""
        found = list(self.job.command)
        for path in filter(None, map(str.strip, self.options.get("code", "").split(","))):
            for at, word in enumerate(found):
                if word == path or word.startswith(f"{path}:"):
                    found[at] = Path(path).name + word.removeprefix(path)
        return found

    def templated(self, base: Manifest, role: str | None) -> Manifest:
        """A pod with the user's templates merged over it: that of all roles, then the role's own."""
        for key in dict.fromkeys(("", role or "")):
            if key in self._templates:
                base = merged(base, self._templates[key])
        return base

    def gpus(self, role: str | None) -> int:
        """The GPUs of each pod of a role; `role` None: of every pod."""
        job = self.job
        given = job.number("gpus", 0) if "gpus" in self.options else None
        if role is None:
            return job.gpus if given is None else given
        each = job.gpus_of(role)
        return given if given is not None and (each or role in ("chief", "worker")) else each

    def arguments(self, *words: str) -> list[str]:
        """The words of a kubectl command in the run's namespace."""
        namespace = self.options.get("namespace")
        return ["kubectl", *(["--namespace", namespace] if namespace else []), *words]

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "paceline", "paceline/run": self.name}

    def metadata(self, name: str) -> Manifest:
        namespace = {"namespace": self.options["namespace"]} if self.options.get("namespace") else {}
        return {"name": name, **namespace, "labels": self.labels}


def _check_values(options: Mapping[str, str]) -> None:
    if options.get("image-pull-policy", "Always") not in PULL:
        raise UnknownName("image-pull-policy", options["image-pull-policy"], PULL)
    for key in ("cpu", "memory", "shm"):
        if key in options and not re.fullmatch(r"\d+(\.\d+)?([mkKMGTPE]|[KMGTPE]i)?", options[key]):
            raise UsageError(f"--engine {key}={options[key]}: a quantity of Kubernetes is needed (2, 500m, 4Gi)")
    if "queue" in options and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", options["queue"]):
        raise UsageError(f"--engine queue={options['queue']}: the name of a LocalQueue of Kueue is needed")


def _code(text: str) -> dict[str, str]:
    """The files of `code=a.py,b.py`, for a ConfigMap."""
    found: dict[str, str] = {}
    for path in [Path(word.strip()) for word in text.split(",") if word.strip()]:
        if path.name in found:
            raise UsageError(f"--engine code=: two files are called {path.name}")
        if not re.fullmatch(r"[-._a-zA-Z0-9]+", path.name):
            raise UsageError(f"--engine code=: {path.name!r} is no name that a ConfigMap takes: letters, digits, - _ .")
        try:
            found[path.name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--engine code={path}: the file cannot be read as text: {error}") from None
    size = sum(len(one.encode()) for one in found.values())
    if size > LARGEST:
        raise UsageError(f"--engine code=: {size:,} bytes are more than a ConfigMap holds; put them into the image")
    return found


def _name(text: str, tasks: int) -> str:
    """A name for use in host names: NAME-chief-0-INDEX and NAME-secret have at most 63 letters."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    room = 63 - len(f"-evaluator-0-{tasks}") - len("-xxxxx")
    if not name or not name[0].isalpha():
        name = f"run-{name}".strip("-")
    return name[:room].rstrip("-")
