"""The names of roles: the words that users write for them, and the two ways in which workers are numbered.

A run numbers workers by rank: the chief has rank 0, worker:1 is the next. A cluster numbers the tasks of each kind from
0: worker:0 is the first worker besides the chief. `role_of_task` and `task_of_role` convert one into the other.
"""

from paceline.errors import UsageError

KINDS = ("chief", "worker", "server", "evaluator")
SINGLE = ("chief", "evaluator")  # a run has at most one of each
WORDS = {**dict(zip(KINDS, KINDS, strict=True)), "ps": "server"}  # of options and variables
TF_WORDS = {"chief": "chief", "master": "chief", "worker": "worker", "ps": "server", "evaluator": "evaluator"}
TRAINING = [word for word, kind in TF_WORDS.items() if kind in ("chief", "worker")]  # of TF_CONFIG, as TF_WORDS are


def kind_of(name: str) -> str:
    """The kind of a task or role: `worker` of `worker:1`."""
    return name.partition(":")[0]


def written(kind: str, index: int) -> str:
    """A role or task as text: worker:1, server:0, chief, evaluator."""
    return kind if kind in SINGLE else f"{kind}:{index}"


def parsed(text: str, what: str = "no role") -> tuple[str, int]:
    """Kind and index of `chief`, `worker:1`, `server:0` (or `ps:0`), `evaluator`."""
    word, _, index = text.strip().partition(":")
    if word not in WORDS or (index and not index.isdigit()):
        raise UsageError(f"{what} {text!r}; there are: chief, worker:N, server:N (or ps:N), evaluator")
    return WORDS[word], int(index or 0)


def of_rank(rank: int) -> str:
    """The role of a worker: rank 0 is the chief."""
    return written("worker", rank) if rank else "chief"


def role_of_task(kind: str, index: int) -> str:
    """The role of a cluster's task, where the cluster has a chief."""
    return of_rank(index + 1) if kind == "worker" else written(kind, index)


def task_of_role(kind: str, index: int) -> str:
    """The cluster's task of a role."""
    return written(kind, index - 1 if kind == "worker" else index)
