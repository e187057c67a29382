"""What of a run can be reached from outside: loopback and silence by default, and a look at the sockets that are open.

docs/security.md has the whole picture.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

# No library reports its use. For every process of a run, and before it imports any of them.
SILENCE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}

# A cluster of the run's own needs no other interface. For every process, and before it imports ray.
LOOPBACK = {
    # Despite its name: 0 makes 127.0.0.1 the node's address on Linux too. `_node_ip_address="127.0.0.1"` does not, as
    # Ray replaces a loopback address by the interface's. TransferQueue binds to the node's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class OpenSocket:
    """A TCP socket that listens on more than loopback.

    Attributes:
        address: The address it is bound to; 0.0.0.0 or :: for every interface.
        port: TCP port.
        pid: Process that listens.
        program: Its title.
    """

    address: str
    port: int
    pid: int
    program: str


def open_sockets(processes: Iterable[psutil.Process]) -> list[OpenSocket]:
    """The listening TCP sockets of some processes that are not bound to a loopback address, by port."""
    found = []
    for process in processes:
        try:
            program = process.cmdline()[:1] or [process.name()]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip):
                    found.append(OpenSocket(connection.laddr.ip, connection.laddr.port, process.pid, program[0]))
        except psutil.Error:  # it ended meanwhile
            continue
    return sorted(found, key=lambda socket: socket.port)


def is_loopback(address: str) -> bool:
    """Whether a socket bound to this address is out of reach for other machines."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def describe(sockets: Sequence[OpenSocket]) -> list[str]:
    """What to tell the user, line by line."""
    if not sockets:
        return ["  network: every socket of this run listens on loopback only"]
    return [
        "! network: these sockets can be reached from other machines (docs/security.md; scripts/private prevents it):",
        *(f"    {socket.address}:{socket.port}  {socket.program.strip()} (pid {socket.pid})" for socket in sockets),
    ]
