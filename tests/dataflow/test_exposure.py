"""Which sockets can be reached from other machines, and what the user is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from dataflow.exposure import OpenSocket, describe, is_loopback, open_sockets

LISTEN = """\
import socket, sys
sockets = [socket.create_server((address, 0)) for address in sys.argv[1:]]
print(*(one.getsockname()[1] for one in sockets), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[tuple[psutil.Process, list[int]]]:
    """A process that listens on every interface and on loopback, and its two ports."""
    command = [sys.executable, "-c", LISTEN, "0.0.0.0", "127.0.0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ports = [int(port) for port in process.stdout.readline().split()]
        yield psutil.Process(process.pid), ports
        process.kill()


def test_a_socket_on_every_interface_is_reported_and_one_on_loopback_is_not(
    listener: tuple[psutil.Process, list[int]],
) -> None:
    process, (everywhere, _) = listener
    (found,) = open_sockets([process])
    assert (found.address, found.port, found.pid) == ("0.0.0.0", everywhere, process.pid)
    assert "python" in found.program


def test_a_process_that_ended_meanwhile_is_passed_over(listener: tuple[psutil.Process, list[int]]) -> None:
    process, _ = listener
    process.kill()
    process.wait()
    assert open_sockets([process]) == []


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.7", False),
        ("::ffff:192.168.1.7", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_addresses_are_told_from_others(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_the_user_reads_who_listens_where_and_what_to_do() -> None:
    (headline, line) = describe([OpenSocket("0.0.0.0", 52365, 4929, "ray::DashboardAgent   ")])
    assert "scripts/private" in headline
    assert line.split() == ["0.0.0.0:52365", "ray::DashboardAgent", "(pid", "4929)"]


def test_nothing_open_is_said_too() -> None:
    (line,) = describe([])
    assert "loopback only" in line
