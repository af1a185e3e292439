"""The address at which other hosts reach this one: of a network interface, or by a site's own rule for its hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import user_code
from paceline.errors import UnknownName, UsageError
from paceline.network.cluster.description import Cluster, is_host

LOOPBACK = "127.0.0.1"

_ADDRESS, _UP = 0x8915, 0x1  # SIOCGIFADDR; IFF_UP
_INFINIBAND = "32"  # ARPHRD_INFINIBAND, as /sys/class/net/*/type has it


@dataclass(frozen=True)
class Interface:
    """A network interface of this host."""

    name: str
    address: str | None  # IPv4
    infiniband: bool = False
    default: bool = False  # the default route uses it

    @property
    def loopback(self) -> bool:
        return self.address is not None and ipaddress.ip_address(self.address).is_loopback


def interfaces(system: Path = Path("/sys/class/net"), routes: Path = Path("/proc/net/route")) -> list[Interface]:
    """The interfaces of this host that are up, by name."""
    default = _default_route(routes)
    found = []
    for folder in sorted(system.iterdir()) if system.is_dir() else []:
        name = folder.name
        if int(_line(folder / "flags") or "0", 16) & _UP:
            found.append(Interface(name, _ipv4(name), _line(folder / "type") == _INFINIBAND, name == default))
    return found


def own_address(
    known: Sequence[Interface], wanted: str | None = None, *, infiniband: bool = True, one_host: bool = False
) -> str:
    """The address of this host on the wanted interface or in the wanted subnet. By default: loopback where the cluster
    has one host; else that of InfiniBand, unless it is excluded; else that of the only interface, or of the default
    route."""
    if wanted is not None:
        return _in_subnet(known, wanted, infiniband) if "/" in wanted else _named(known, wanted, infiniband)
    if one_host:
        return LOOPBACK
    usable = [one for one in known if one.address and not one.loopback and (infiniband or not one.infiniband)]
    for choice in ([one for one in usable if one.infiniband], usable, [one for one in usable if one.default]):
        if len(choice) == 1:
            return choice[0].address or ""
    if not usable:
        raise UsageError(f"no network interface with an address; there are: {_listed(known)}")
    raise UsageError(f"several network interfaces could be meant: {_listed(usable)}; name one with --interface")


def site_rule(reference: str) -> Callable[[str], str]:
    """A site's own rule from host name to address, `file.py:function` or `package.module:function`."""
    rule = user_code.function("rule from host to address", reference)

    def checked(host: str) -> str:
        found = user_code.attempt(f"the address of {host} by {reference}", rule, host)
        if not isinstance(found, str) or not is_host(found):
            raise UsageError(f"{reference} gave {found!r} for {host!r}; it must give an address or a host name")
        return found

    return checked


def called(cluster: Cluster, rule: Callable[[str], str]) -> Cluster:
    """The same cluster with the rule applied to every host; it is called once for each."""
    hosts = [task.host for task in cluster.tasks] + [seat.host for seat in cluster.seats]
    known = {host: rule(host) for host in dict.fromkeys(hosts) if host}
    named = {task: replace(task, host=known.get(task.host or "")) for task in cluster.tasks}
    seats = {seat: replace(seat, host=known.get(seat.host or "")) for seat in cluster.seats}
    return replace(
        cluster,
        tasks=tuple(named.values()),
        me=named.get(cluster.me, cluster.me) if cluster.me else None,
        seats=tuple(seats.values()),
        seat=seats[cluster.seat] if cluster.seat else None,
    )


def _named(known: Sequence[Interface], name: str, infiniband: bool) -> str:
    found = next((one for one in known if one.name == name), None)
    if found is None:
        raise UnknownName("network interface", name, [one.name for one in known])
    if found.infiniband and not infiniband:
        raise UsageError(f"--interface {name} is InfiniBand, which --no-ib excludes")
    if found.address is None:
        raise UsageError(f"network interface {name} has no IPv4 address")
    return found.address


def _in_subnet(known: Sequence[Interface], text: str, infiniband: bool) -> str:
    try:
        subnet = ipaddress.IPv4Network(text, strict=False)
    except ValueError as error:
        raise UsageError(f"--interface {text}: not an IPv4 subnet as 10.1.0.0/16: {error}") from None
    within = [one for one in known if one.address and ipaddress.IPv4Address(one.address) in subnet]
    allowed = [one for one in within if infiniband or not one.infiniband]
    if len(allowed) == 1:
        return allowed[0].address or ""
    if not within:
        raise UsageError(f"no network interface in {text}; there are: {_listed(known)}")
    if not allowed:
        raise UsageError(f"only InfiniBand is in {text} ({_listed(within)}), which --no-ib excludes")
    raise UsageError(f"several network interfaces are in {text}: {_listed(allowed)}; name one")


def _listed(known: Sequence[Interface]) -> str:
    return ", ".join(f"{one.name} ({one.address or 'no address'})" for one in known) or "none"


def _ipv4(name: str) -> str | None:
    """The address of an interface, from the kernel; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        try:
            answer = fcntl.ioctl(ask.fileno(), _ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _default_route(routes: Path) -> str | None:
    """The interface of the first default route."""
    try:
        lines = routes.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    rows = [line.split() for line in lines]
    return next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), None)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
