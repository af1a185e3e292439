"""A user's pod template, merged over the pod that paceline makes: the template takes precedence.

Lists whose entries have a name (containers, env, volumes, …) are merged by name, as `kubectl apply` does; other lists
(tolerations, args, …) are replaced. A null removes an entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UnknownName, UsageError

Manifest = dict[str, Any]

CONTAINER = "paceline"
# the field that identifies the entries of a list
NAMED_BY = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets", "resourceClaims"), "name"),
    **{"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort", "hostAliases": "ip"},
    "topologySpreadConstraints": "topologyKey",
}
# fields and labels that a template must not change
OWN_FIELDS = ("restartPolicy", "subdomain", "hostname", "setHostnameAsFQDN", "activeDeadlineSeconds")
OWN_LABELS = ("paceline/run", "paceline/role")


def read(path: Path, key: str) -> Manifest:
    """A file with `metadata` and `spec` of a pod, or with a whole Pod or PodTemplate. `key`: of --engine."""
    where = f"--engine {key}={path}"
    try:
        documents = [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: the file cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{where}: the file is not YAML: {error}") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise UsageError(f"{where}: one document is needed, with `metadata` and `spec` of a pod")
    found: Manifest = documents[0]
    kind = found.get("kind", "Pod")
    if kind == "PodTemplate":
        found = found.get("template") or {}
        if not isinstance(found, dict):
            raise UsageError(f"{where}: template must be a mapping")
    elif kind != "Pod":
        raise UsageError(f"{where}: it describes a {kind}; a Pod or a PodTemplate is needed")
    _check(found, where)
    return {name: found[name] for name in ("metadata", "spec") if found.get(name)}


def _check(template: Manifest, where: str) -> None:
    for name in template:
        if name not in ("apiVersion", "kind", "metadata", "spec"):
            raise UnknownName(f"field of a pod template in {where}:", name, ("metadata", "spec"))
    for name in ("metadata", "spec"):
        if not isinstance(template.get(name, {}), dict | None):
            raise UsageError(f"{where}: {name} must be a mapping")
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for name in metadata:
        if name not in ("labels", "annotations", "name", "creationTimestamp"):
            raise UsageError(f"{where}: metadata.{name} is not taken over; labels and annotations are")
    for label in OWN_LABELS:
        if label in (metadata.get("labels") or {}):
            raise UsageError(f"{where}: the label {label} is paceline's own")
    for name in OWN_FIELDS:
        if name in spec:
            raise UsageError(f"{where}: spec.{name} is paceline's own: a run depends on it")
    for name, field in NAMED_BY.items():
        _check_entries(spec.get(name), field, f"{where}: spec.{name}")
    for container in spec.get("containers") or []:
        _check_container(container, f"{where}: container {container['name']}")


def _check_container(container: Manifest, where: str) -> None:
    for name, field in NAMED_BY.items():
        _check_entries(container.get(name), field, f"{where}: {name}")
    if container["name"] != CONTAINER:
        return
    for name in ("command", "args"):
        if name in container:
            raise UsageError(f"{where}: {name} is paceline's own; `paceline train` says what to train")
    for entry in container.get("env") or []:
        if str(entry["name"]).startswith("PACELINE_") and entry["name"] != "PACELINE_DATA":
            raise UsageError(f"{where}: the variable {entry['name']} is paceline's own")


def _check_entries(entries: Any, field: str, where: str) -> None:
    if entries is None:
        return
    if not isinstance(entries, list):
        raise UsageError(f"{where} must be a list")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or field not in entry:
            hint = f"; paceline's own container is called {CONTAINER}" if where.endswith("containers") else ""
            raise UsageError(f"{where}[{number}] has no {field}{hint}")


def merged(base: Any, over: Any, name: str = "") -> Any:
    """`over` merged over `base`; neither is changed. `name`: the name of their field."""
    if isinstance(base, dict) and isinstance(over, dict):
        found = dict(base)
        for key, value in over.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = merged(found.get(key), value, key)
        # a variable has one source of its value, and a volume one of its contents
        return over if name in NAMED_BY and _another_source(base, over) else found
    if isinstance(base, list) and isinstance(over, list) and name in NAMED_BY:
        field = NAMED_BY[name]
        upper = {entry[field]: entry for entry in over}
        known = [entry[field] for entry in base]
        kept = [merged(entry, upper[entry[field]], name) if entry[field] in upper else entry for entry in base]
        return kept + [entry for entry in over if entry[field] not in known]
    return over


def _another_source(base: Manifest, over: Manifest) -> bool:
    """Whether `over` gives an entry of `env` or `volumes` another kind of source."""
    plain = {"name", "mountPath"}
    sources = [{key for key in one if key not in plain} for one in (base, over)]
    kinds = ({"value", "valueFrom"}, {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "hostPath", "nfs"})
    return any(sources[0] & kind and sources[1] & kind and sources[0] != sources[1] for kind in kinds)
