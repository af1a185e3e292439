"""The hub's address in the store that torchrun's agent serves at MASTER_ADDR:MASTER_PORT, for the other ranks.

Only the address is written there. The store checks no secret; but a process that reads or forges the address must
still prove the secret: the agent to the hub, and the hub to the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from paceline.errors import UsageError
from paceline.network.cluster.description import address
from paceline.network.cluster.detect import Variables
from paceline.network.cluster.sources import torchrun

NAME = "torchrun's store"


def present(environment: Mapping[str, str]) -> bool:
    """Whether an agent serves a store for this process."""
    given = Variables(NAME, environment)
    return torchrun.has_agent(given) and None not in (given.text("MASTER_ADDR"), given.text("MASTER_PORT"))


def publish(environment: Mapping[str, str], hub: str, seconds: float = 60.0) -> None:
    """Write the hub's `host:port` for the other ranks of this restart."""
    address(hub, NAME)
    try:
        _store(environment, seconds).set(_key(environment), hub)
    except (DistError, RuntimeError) as error:
        raise UsageError(f"{NAME}: {_brief(error)}") from None


def wait(environment: Mapping[str, str], seconds: float) -> str:
    """The hub's `host:port`; TimeoutError if it is not written within `seconds`. It may be that of the last hub: a node
    that joins restarts all ranks without another count of restarts. Callers that cannot connect must ask again."""
    try:
        told = _store(environment, seconds).get(_key(environment))
    except (DistError, RuntimeError) as error:
        raise TimeoutError(f"{NAME} has not told the hub's address: {_brief(error)}") from None
    hub = bytes(told[:300]).decode("ascii", "replace")
    address(hub, NAME)
    return hub


def _store(environment: Mapping[str, str], seconds: float) -> TCPStore:
    given = Variables(NAME, environment)
    given.need("MASTER_ADDR", "MASTER_PORT")
    port = given.needed("MASTER_PORT", least=1)
    limit = timedelta(seconds=max(seconds, 0.001))
    return TCPStore(given.text("MASTER_ADDR") or "", port, is_master=False, timeout=limit, wait_for_workers=False)


def _key(environment: Mapping[str, str]) -> str:
    """The key of this run and this restart: the hub of an earlier one has ended."""
    given = Variables(NAME, environment)
    return f"paceline/hub/{given.text('TORCHELASTIC_RUN_ID')}/{given.text('TORCHELASTIC_RESTART_COUNT') or 0}"


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
