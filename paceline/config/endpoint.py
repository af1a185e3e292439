"""Where a process of a run is, how processes of other nodes reach it, and the ports that it may listen on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

PORTS, VARIABLE = "--ports", "PACELINE_PORTS"
HIGHEST = 65535


@dataclass(frozen=True)
class Ports:
    """A range of ports, fixed for a firewall: `--ports 20000-20040`. Each listener takes the first one that is free.
    `firm`: no other port may be taken."""

    first: int
    last: int
    firm: bool = True

    @classmethod
    def parse(cls, text: str, where: str = PORTS) -> Ports:
        """`20000-20040`, or one port; `where` is what an error calls it."""
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", text)
        if match is None:
            raise UsageError(f"{where} {text}: write the first and the last port, such as 20000-20040")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"{where} {text}: the lower port comes first: {last}-{first}")
        if first < 1 or last > HIGHEST:
            raise UsageError(f"{where} {text}: ports are numbers from 1 to {HIGHEST}")
        return cls(first, last)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def ports_of(environment: Mapping[str, str]) -> Ports | None:
    """The range that the variable names; None: the system chooses ports."""
    text = environment.get(VARIABLE, "")
    return Ports.parse(text, VARIABLE) if text.strip() else None


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
