"""Where the ranks of a torchrun learn of the hub: the store that torchrun's agent keeps at MASTER_ADDR:MASTER_PORT.

Only the hub's address is written there. The store asks nobody for a secret: whoever reads or forges the address has
still to prove the secret at the hub, or to be refused as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from paceline.errors import UsageError
from paceline.network.cluster.description import address
from paceline.network.cluster.environment import Variables

NAME = "torchrun's store"


def present(environment: Mapping[str, str]) -> bool:
    """Whether an agent keeps a store for this process."""
    given = Variables(NAME, environment)
    own = (given.text("TORCHELASTIC_USE_AGENT_STORE") or "").lower() in ("true", "1")
    return own and given.text("MASTER_ADDR") is not None and given.text("MASTER_PORT") is not None


def publish(environment: Mapping[str, str], hub: str, seconds: float = 60.0) -> None:
    """Tell the others of this round where the hub is, as `host:port`."""
    address(hub, NAME)
    try:
        _store(environment, seconds).set(_key(environment), hub)
    except (DistError, RuntimeError) as error:
        raise UsageError(f"{NAME}: {_brief(error)}") from None


def wait(environment: Mapping[str, str], seconds: float) -> str:
    """The hub's `host:port`, waited for at most so long; TimeoutError if nobody has told it by then.

    A node that joins begins everybody anew without another count of restarts: what is read may be the last hub's. So
    whoever finds nobody there asks again.
    """
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
    """Of this run and this beginning: the hub of the last one is gone."""
    given = Variables(NAME, environment)
    return f"paceline/hub/{given.text('TORCHELASTIC_RUN_ID')}/{given.text('TORCHELASTIC_RESTART_COUNT') or 0}"


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
