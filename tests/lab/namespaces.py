"""Several hosts on one machine: network namespaces, entered by a thread or by a command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyroute2 import netns

from tests.lab.processes import Argument, CommandError, run


@contextmanager
def namespace(name: str) -> Iterator[str]:
    """A network namespace with its loopback up, for the time of the block."""
    run(["ip", "netns", "add", name])
    try:
        run(within(name, ["ip", "link", "set", "lo", "up"]))
        yield name
    finally:
        run(["ip", "netns", "delete", name])


def within(name: str | None, command: Sequence[Argument]) -> list[Argument]:
    """The command as it is run in a namespace (with its /sys), or (None) where we are."""
    return [*(("ip", "netns", "exec", name) if name else ()), *command]


#: For an answer that must come: a busy machine may take so long. Nobody waits after it has come.
ANSWER_S = 30


def pings(source: str | None, address: str, count: int = 1, wait_s: int = 1) -> bool:
    """Whether an address answers, to one of so many pings from a namespace, or (None) from where we are."""
    ping = ["ping", "-c", str(count), "-i", "0.2", "-W", str(wait_s), address]
    try:
        run(within(source, ping), timeout=10 + count + wait_s)
    except CommandError:
        return False
    return True


@contextmanager
def entered(name: str | None) -> Iterator[None]:
    """This thread is in the namespace for the time of the block; sockets it makes stay there."""
    if name is None:
        yield
        return
    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


def connect(one: str, device: str, other: str, peer: str, mtu: int = 1500) -> None:
    """Join two namespaces by a wire: a veth pair with an end in each, both up."""
    run(
        [
            "ip",
            "link",
            "add",
            device,
            "netns",
            one,
            "mtu",
            str(mtu),
            "type",
            "veth",
            "peer",
            "name",
            peer,
            "netns",
            other,
            "mtu",
            str(mtu),
        ]
    )
    for name, end in ((one, device), (other, peer)):
        run(within(name, ["ip", "link", "set", end, "up"]))
