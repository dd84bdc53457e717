"""The network interface of collectives where ranks are on several nodes: the one by which a rank reaches rank 0."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Mapping

import psutil

from asyncrl.errors import RunError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def bind_to(leader: str) -> None:
    """Binds gloo and NCCL to the interface that leads to the address of rank 0, unless the node's environment names
    one. Raises RunError when none has the address that leads there."""
    if GLOO in os.environ and NCCL in os.environ:
        return
    own = own_address(leader)
    addresses = psutil.net_if_addrs()
    name = holding(own, {name: [(a.address, a.netmask or "") for a in at] for name, at in addresses.items()})
    if not name:
        raise RunError(
            f"no network interface of {socket.gethostname()} has the address {own}, by which it reaches rank 0 of the "
            f"learner at {leader}: set {GLOO} and {NCCL} in the environment of the node."
        )
    os.environ.setdefault(GLOO, name)
    os.environ.setdefault(NCCL, f"={name}")  # without the sign, also those whose names begin so


def own_address(peer: str) -> str:
    """The address of this host from which it reaches `peer`. Raises OSError without a way there."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


def holding(address: str, interfaces: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """The interface that has the address, or else its network, as the loopback has every 127.0.0.x; empty: none.
    `interfaces`: addresses with masks, among them some of other kinds.

    >>> holding("127.0.0.3", {"eth0": [("10.0.0.7", "255.255.255.0")], "lo": [("127.0.0.1", "255.0.0.0")]})
    'lo'
    """
    own = ipaddress.ip_address(address)
    held = [(name, network) for name, given in interfaces.items() for network in _held(given)]
    having = [name for name, network in held if network.ip == own]
    within = [name for name, network in held if own in network.network]
    return next(iter([*having, *within]), "")


def _held(given: Iterable[tuple[str, str]]) -> Iterator[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Addresses with their networks, without those of the card itself."""
    for text, mask in given:
        plain = text.partition("%")[0]
        with contextlib.suppress(ValueError):
            yield ipaddress.ip_interface(f"{plain}/{mask}" if "." in mask else plain)
