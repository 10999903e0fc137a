"""What runs on the host for the tests: VMs' stand-ins that exchange numbered datagrams, and who looks at it.

``python -m tests.packages.inside COMMAND`` prints JSON in its last line. ``vms`` and ``watch`` run until they
are stopped, as units of systemd.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab.namespaces import within
from tests.lab.processes import Argument, Daemon, run, wait_for
from tests.lab.steps import host_state
from tests.lab.traffic_taps import TapVm
from tests.lab.vm import Vm

VMS, WATCHED = Path("/run/lab-vms"), Path("/run/lab-watch")
SHARE = Path("/srv/share")
PROGRAM = SHARE / "sequenced"
RATE, PORT, DEADLINE_S = 1000, 7000, 100.0
#: Backend, its ports, and the last byte of their MACs and addresses.
PAIRS = {
    "dpdkvhostuser": {"vhost1": 1, "vhost2": 2},
    "linuxbridge": {"tap1": 3, "tap2": 4},
    #: OVS-DPDK without the agent.
    "plain": {"plain1": 5, "plain2": 6},
}


def mac(number: int) -> str:
    return f"52:54:00:00:00:{number:02x}"


def address(number: int) -> str:
    return f"10.0.0.{number}"


class SystemOvs:
    """The clients of the host's own OVS, as ``PrivateOvs`` has them."""

    def dbclient(self, command: str, *words: Argument) -> str:
        return run(["ovsdb-client", command, "unix:/run/openvswitch/db.sock", *words], DEADLINE_S)

    def ofctl(self, *words: Argument) -> str:
        return run(["ovs-ofctl", *words], DEADLINE_S)


def until_stopped(ready: Path) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    ready.touch()
    over.wait()
    ready.unlink()


def vms() -> None:
    """Two VMs on each backend of the bindings; each pair exchanges datagrams both ways, and a TCP stream."""
    bindings: dict[str, dict[str, Any]] = json.loads((SHARE / "bindings.json").read_text())
    VMS.mkdir(exist_ok=True)
    with ExitStack() as stack:
        for backend, ports in PAIRS.items():
            if not ports.keys() <= bindings.keys():
                continue
            for port_id, number in ports.items():
                made = vm_of(backend, bindings[port_id], f"vm-{port_id}", mac(number), address(number))
                stack.enter_context(made)
            reached = partial(made.pings, address(min(ports.values())))
            wait_for(reached, DEADLINE_S, f"the VMs of {backend} reach each other")
            (one, first), (two, second) = ports.items()
            for port_id, kind, own, other in (
                (one, "listen", first, second),
                (two, "connect", second, first),
            ):
                words: list[Argument] = [PROGRAM, kind, address(own), address(other), str(PORT), str(RATE)]
                talker = Daemon(port_id, within(f"vm-{port_id}", words), VMS / f"{port_id}.counts")
                stack.enter_context(talker)
                (VMS / f"{port_id}.pid").write_text(str(talker.pid))
                wait_for(partial(printed, one, SAYS[kind]), DEADLINE_S, f"{one} is {SAYS[kind]}")
        until_stopped(VMS / "ready")


#: What the one that listens prints when it does, and when the other has connected.
SAYS = {"listen": "listening", "connect": "connected"}


def printed(name: str, word: str) -> bool:
    return word in (VMS / f"{name}.counts").read_text()


def vm_of(backend: str, binding: Mapping[str, Any], name: str, own_mac: str, own: str) -> TapVm | Vm:
    if backend == "linuxbridge":
        return TapVm(name, None, binding["device"], own_mac, own)
    log = VMS / f"{name}.testpmd.log"
    return Vm(name, binding["socket_path"], own_mac, own, log=log, reconnects=True)


def counts() -> dict[str, Any]:
    """What each talker has counted by now."""
    return {path.stem: counted(path.stem) for path in VMS.glob("*.pid")}


def counted(name: str) -> Any:
    log = VMS / f"{name}.counts"
    before = len(log.read_text().splitlines())
    os.kill(int((VMS / f"{name}.pid").read_text()), signal.SIGUSR2)
    lines: list[str] = []

    def counted_again() -> bool:
        lines[:] = log.read_text().splitlines(keepends=True)
        return len(lines) > before and lines[-1].endswith("\n")

    wait_for(counted_again, DEADLINE_S, f"{name} says what it has counted")
    return json.loads(lines[-1])


def watch() -> None:
    """Write down each change of links, queues, rules and flows, until it is stopped."""
    WATCHED.mkdir(exist_ok=True)
    bridges = run(["ovs-vsctl", "list-br"]).split()
    commands = [
        ["nft", "monitor"],
        ["ip", "monitor", "link", "address", "route", "rule"],
        ["tc", "monitor"],
        *(["ovs-ofctl", "-O", "OpenFlow14", "monitor", name, "watch:!initial"] for name in bridges),
    ]
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            log = WATCHED / f"{number}-{command[0]}.log"
            stack.enter_context(Daemon(command[0], ["stdbuf", "-oL", *command], log))
        until_stopped(WATCHED / "ready")


def state() -> list[str]:
    """The host, without the store."""
    return sorted(
        host_state.compared(
            host_state.of_ovs(SystemOvs()),  # type: ignore[arg-type]
            host_state.of_links(),
            host_state.of_bridges(),
            host_state.of_files(Path("/run/netplugin")),
        )
    )


def ready() -> bool:
    """Whether the agent is."""
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect("/run/netplugin/agent.sock")
            asked.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            return b'"ready":true' in asked.makefile("rb").read()
    except OSError:
        return False


def files() -> list[str]:
    """Every file of the root file system but those that the system or apt write by themselves."""
    return sorted(_files(Path("/")))


def _files(top: Path) -> Iterator[str]:
    device = top.stat().st_dev
    for place, names, found in os.walk(top):
        paths = [Path(place) / name for name in names]
        kept = [path for path in paths if str(path) not in OWN and path.lstat().st_dev == device]
        names[:] = [path.name for path in kept]
        others = (Path(place) / name for name in found)
        for path in (*kept, *(path for path in others if str(path) not in OWN)):
            about = path.lstat()
            yield f"{path} {about.st_mode:o} {about.st_uid}:{about.st_gid}"


#: Of these each start of the system, of OVS or of libvirt changes something, and each run of apt.
OWN = set(
    "/proc /sys /dev /run /tmp /srv /root /var/tmp /var/cache /var/lib/systemd /var/lib/apt /var/lib/dpkg"
    " /var/lib/libvirt /var/lib/openvswitch /etc/openvswitch /var/log/journal /var/log/apt /var/log/libvirt"
    " /var/log/openvswitch /var/log/dpkg.log /var/lib/libuuid".split()
)

COMMANDS: Mapping[str, Callable[[], Any]] = {
    each.__name__: each for each in (vms, counts, watch, state, files, ready)
}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]]()))
