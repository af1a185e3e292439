"""Where a process of a run is, and how processes of other nodes reach it: plain data."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.ports import Ports


@dataclass(frozen=True)
class Certificates:
    """Files in PEM. `authority` signed the certificates of all nodes; without it there is one certificate for all."""

    certificate: Path
    key: Path
    authority: Path | None = None


@dataclass(frozen=True)
class Endpoint:
    """The node of a process, its address, and the secret that connections between nodes are proved with."""

    number: int = 0  # of the node
    address: str = "127.0.0.1"
    secret: bytes | None = field(default=None, repr=False)  # None: there is no other node
    certificates: Certificates | None = None  # None: connections are not encrypted
    share: bool = True  # memory with other nodes of the same host
    store: tuple[str, int, bytes] | None = field(default=None, repr=False)  # address, port, secret: for collectives
    ports: Ports | None = None  # for everything that listens on this node; None: the system chooses

    @property
    def transport(self) -> str:
        """The transport of calls (see paceline/transports/). PACELINE_TRANSPORT names another one between nodes."""
        return "shared-memory" if self.secret is None else os.environ.get("PACELINE_TRANSPORT", "tcp")

    def to_json(self) -> dict[str, Any]:
        """As plain data. It holds the secret: it may go only where no other user reads it."""
        files = self.certificates
        return {
            "number": self.number,
            "address": self.address,
            "secret": self.secret.hex() if self.secret is not None else None,
            "store": [*self.store[:2], self.store[2].hex()] if self.store is not None else None,
            "tls": [str(files.certificate), str(files.key), str(files.authority or "")] if files is not None else None,
            "ports": asdict(self.ports) if self.ports is not None else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Endpoint:
        """An endpoint from `to_json`."""
        files = store = None
        if data["tls"] is not None:
            certificate, key, authority = data["tls"]
            files = Certificates(Path(certificate), Path(key), Path(authority) if authority else None)
        if data["store"] is not None:
            address, port, proof = data["store"]
            store = address, port, bytes.fromhex(proof)
        secret = bytes.fromhex(data["secret"]) if data["secret"] is not None else None
        ports = Ports(**data["ports"]) if data["ports"] is not None else None
        return cls(data["number"], data["address"], secret, files, store=store, ports=ports)


ALONE = Endpoint()
