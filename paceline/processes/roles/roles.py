"""Which roles a run has: chief, workers, servers, evaluator; and which workers live in which process."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.from_plan import UNDECIDED
from paceline.config.plan import Plan
from paceline.config.role_names import written
from paceline.errors import UsageError
from paceline.scheme import Scheme


@dataclass(frozen=True)
class Role:
    """The role of a process. The chief is worker 0."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return written(self.kind, self.index)

    @property
    def trains(self) -> bool:
        """Whether workers live in its process."""
        return self.kind in ("chief", "worker")

    @property
    def file(self) -> str:
        """The name of its log."""
        return str(self).replace(":", "-")


def roles_of(plan: Plan, scheme: Scheme) -> list[Role]:
    """Every role of a run."""
    if plan.script and plan.evaluator:
        raise UsageError(
            "a script cannot have an evaluator: only the script knows its data; "
            "give attach(evaluate=…) a function, and the hook validation to have the chief call it"
        )
    roles = [Role("worker" if index else "chief", index) for index in range(plan.hosts)]
    roles += [Role("server", shard) for shard in range(servers_of(plan, scheme))]
    return [*roles, Role("evaluator")] if plan.evaluator else roles


def servers_of(plan: Plan, scheme: Scheme) -> int:
    """How many servers are started. A script may yet choose a scheme that needs them; they end if it does not."""
    return plan.servers if scheme.methods or scheme is UNDECIDED else 0


def ranks(role: Role, plan: Plan) -> range:
    """The workers that live in a process: one, or with `exact` several."""
    return range(role.index, plan.workers, plan.hosts) if role.trains else range(0)


def places(role: Role, plan: Plan) -> list[int]:
    """The numbers of all wakeup pipes of a process: one per worker that lives in it, else its own."""
    return list(ranks(role, plan)) or [place(role, plan)]


def place(role: Role, plan: Plan) -> int:
    """The number of a role's wakeup pipe."""
    if role.kind == "evaluator":
        return plan.workers + plan.servers
    return role.index + (plan.workers if role.kind == "server" else 0)
