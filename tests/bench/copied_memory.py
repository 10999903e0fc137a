"""Whether QEMU copies all that a guest writes: two QEMUs and a migration, without libvirt and the agent.

    python -m tests.nested.prepare   # QEMU 10, once
    python -m tests.lab.sandbox --guests --hugepages 200 -- python -m tests.bench.copied_memory [RUNS]

The source is stopped when all is copied, and the destination is not started: their memory must be the same
then. OVS-DPDK writes the guest's memory too, by vhost-user. The second pass is slow, as that of a large VM.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.live_migration import row
from tests.lab import kernel
from tests.lab.accelerator import COMMAND_LINE, EMULATOR
from tests.lab.guest import MORE_KIB, Guest
from tests.lab.hypervisor import silence
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, Running, run, wait_for
from tests.lab.sequenced import PROGRAM, Peer, program, start_in
from tests.lab.switch import switch, wire
from tests.lab.two_hosts import MTU, PEER, PEER_ADDRESS, PEER_MAC, UPLINK_DEVICE, know_at_peer, make_peer
from tests.nested.prepare import Emulator, fetch

PAGE = 4096
MEMORY_KB = 128 << 10
# The fast way to read the marks of written pages is for sizes in whole words of them, of 64 pages each.
ODD_KB = MEMORY_KB + MORE_KIB
HOST, BRIDGE = "np-copied", "br-copied"
MAC, ADDRESS = "52:54:00:0c:00:01", "10.0.0.1"
FIRST_BYTES, SLOW_BYTES, FAST_BYTES = 1 << 25, 1 << 20, 1 << 34
SLOW_FROM_BYTES = 8 << 20
SLOW_S = 5.0
DEADLINE_S = 120.0
HEAD = ("QEMU", "guest memory, KiB", "migrations", "with lost pages", "lost pages", "of used rings")


class Qemu(Running):
    """A guest without libvirt. With ``incoming``, a socket, its memory comes from there and it stands."""

    def __init__(
        self,
        directory: Path,
        name: str,
        emulator: Emulator | None,
        memory_kb: int,
        nic: Path,
        incoming: Path | None = None,
    ) -> None:
        """``emulator``: None for that of the machine; ``nic``: the socket of its NIC."""
        self.guest = Guest(name, directory / name, {PROGRAM: program()})
        self._incoming = incoming is not None
        self._qmp = self.guest.files.directory / "qmp"
        self.guest.prepare()
        words: list[str | Path] = [emulator.program if emulator else EMULATOR]
        for data in emulator.data if emulator else ():
            words += ["-L", data]
        words += ["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-cpu", "max"]
        words += ["-machine", "q35,memory-backend=ram", "-m", f"{memory_kb}k"]
        words += ["-object", f"memory-backend-memfd,id=ram,share=on,size={memory_kb}k"]
        words += ["-kernel", kernel.cached().image, "-initrd", self.guest.files.initramfs]
        words += ["-append", COMMAND_LINE, "-serial", f"file:{self.guest.files.console}"]
        words += ["-serial", f"unix:{self.guest.files.channel},server=on,wait=off"]
        words += ["-qmp", f"unix:{self._qmp},server=on,wait=off"]
        words += ["-chardev", f"socket,id=nic,path={nic},server=on"]
        words += ["-netdev", "vhost-user,id=net,chardev=nic"]
        # QEMU 7.2 without KVM crashes with MSI-X on vhost-user.
        words += ["-device", f"virtio-net-pci,id=nic0,netdev=net,mac={MAC},vectors=0"]
        if incoming is not None:
            words += ["-S", "-incoming", f"unix:{incoming}"]
        environment = emulator.environment if emulator else {}
        self._daemon = Daemon("qemu", words, self.guest.files.directory / "qemu.log", environment)
        self._socket = socket.socket(socket.AF_UNIX)
        self._answers: Iterator[dict[str, Any]] = iter(())

    def start(self) -> None:
        self._daemon.start()
        self._daemon.wait_for(self._answers_to_qmp, DEADLINE_S, "QEMU answers")
        self.ask("qmp_capabilities")
        if not self._incoming:
            self.guest.attach()

    def stop(self) -> None:
        self.guest.close()
        self._socket.close()
        self._daemon.kill()

    def ask(self, command: str, **arguments: object) -> Any:
        """Answer to a QMP command."""
        asked = {"execute": command, "arguments": {k.replace("_", "-"): v for k, v in arguments.items()}}
        self._socket.sendall(json.dumps(asked).encode() + b"\n")
        for answer in self._answers:
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer['error']['desc']}")
        raise RuntimeError(f"{command}: QEMU has ended\n{self._daemon.tail()}")

    def memory(self) -> bytes:
        for number in Path(f"/proc/{self._daemon.pid}/fd").iterdir():
            if "memory-backend-memfd" in os.readlink(number):
                return number.read_bytes()
        raise RuntimeError("QEMU has no memory in a file")

    def ring_pages(self) -> set[int]:
        """The pages of the rings of its NIC that the other side writes (the used rings)."""
        pages = set()
        for queue in range(2):
            path = "/machine/peripheral/nic0/virtio-backend"
            status = self.ask("x-query-virtio-queue-status", path=path, queue=queue)
            pages.add(status["vring-used"] // PAGE)
        return pages

    def _answers_to_qmp(self) -> bool:
        try:
            self._socket.connect(str(self._qmp))
        except OSError:
            return False
        self._answers = map(json.loads, self._socket.makefile("rb"))
        next(self._answers)
        return True


@dataclass(frozen=True)
class Lost:
    """Pages that differ after a migration."""

    pages: int
    of_rings: int


def copied(source: Qemu, target: Qemu, at: Path) -> Lost:
    """Migrate, slowly after the first pass, and compare."""
    source.ask("migrate-set-parameters", max_bandwidth=FIRST_BYTES, downtime_limit=1)
    source.ask("migrate", uri=f"unix:{at}")
    # Slow before the first pass ends, or all might be copied then.
    wait_for(lambda: 0 < ram(source, "remaining") < SLOW_FROM_BYTES, DEADLINE_S, "most is copied")
    source.ask("migrate-set-parameters", max_bandwidth=SLOW_BYTES)
    wait_for(lambda: ram(source, "dirty-sync-count") > 1, DEADLINE_S, "a second pass")
    begun = migration(source)["total-time"]
    wait_for(
        lambda: migration(source)["total-time"] >= begun + SLOW_S * 1000,
        DEADLINE_S,
        "it has been copied slowly",
    )
    source.ask("migrate-set-parameters", max_bandwidth=FAST_BYTES, downtime_limit=300)
    wait_for(lambda: migration(source)["status"] in ("completed", "failed"), DEADLINE_S, "all is copied")
    if migration(source)["status"] != "completed":
        raise RuntimeError(f"the migration failed: {migration(source)}")
    wait_for(lambda: target.ask("query-status")["status"] == "paused", DEADLINE_S, "all has arrived")
    one, other = memoryview(source.memory()), memoryview(target.memory())
    lost = {n // PAGE for n in range(0, len(one), PAGE) if one[n : n + PAGE] != other[n : n + PAGE]}
    return Lost(len(lost), len(lost & source.ring_pages()))


def ram(source: Qemu, what: str) -> int:
    return int(migration(source).get("ram", {}).get(what, 0))


def migration(source: Qemu) -> dict[str, Any]:
    return dict(source.ask("query-migrate"))


def migrated(directory: Path, emulator: Emulator | None, memory_kb: int, ovs: PrivateOvs) -> Lost:
    """A guest with 1,000 datagrams a second each way, by OVS-DPDK."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(port(ovs, directory, name)) for name in ("source", "target")]
        source = stack.enter_context(Qemu(directory, "source", emulator, memory_kb, sockets[0]))
        at = directory / "incoming"
        target = stack.enter_context(Qemu(directory, "target", emulator, memory_kb, sockets[1], at))
        source.guest.boot()
        silence(source.guest)
        device = source.guest.configure(MAC, f"{ADDRESS}/24")
        source.guest.check(f"arp -i {device} -s {PEER_ADDRESS} {PEER_MAC}")
        know_at_peer(ADDRESS, MAC)
        source.guest.wait_pings(PEER_ADDRESS)
        peer = stack.enter_context(Peer(directory, within(PEER, []), PEER_ADDRESS, ADDRESS))
        start_in(source.guest, ADDRESS, PEER_ADDRESS)
        peer.wait_connected()
        peer.wait_received()
        return copied(source, target, at)


@contextmanager
def port(ovs: PrivateOvs, directory: Path, name: str) -> Iterator[Path]:
    """The socket of a port for a VM."""
    path = directory / f"{name}.nic"
    interface = ["--", "set", "Interface", name, "type=dpdkvhostuserclient"]
    ovs.vsctl("add-port", BRIDGE, name, *interface, f"options:vhost-server-path={path}")
    try:
        yield path
    finally:
        ovs.vsctl("del-port", BRIDGE, name)


@contextmanager
def wired_ovs(directory: Path) -> Iterator[PrivateOvs]:
    """An OVS-DPDK with a bridge on a switch, on which the peer is too."""
    with switch(), namespace(PEER), namespace(HOST):
        make_peer()
        wire(HOST, "eth1", MTU)
        with PrivateOvs(directory, socket_mem_mb=128, netns=HOST) as ovs:
            ovs.vsctl("add-br", BRIDGE, "--", "set", "Bridge", BRIDGE, "datapath_type=netdev")
            device = f"options:dpdk-devargs={UPLINK_DEVICE.format('eth1')}"
            ovs.vsctl("add-port", BRIDGE, "up", "--", "set", "Interface", "up", "type=dpdk", device)
            yield ovs


def version(emulator: Emulator | None) -> str:
    program = emulator.program if emulator else EMULATOR
    environment: Mapping[str, str] = emulator.environment if emulator else {}
    return run([program, "--version"], env=environment).split("version ")[1].split()[0]


def main(runs: int) -> None:
    print(row(HEAD))
    print(row(["---"] * len(HEAD)), flush=True)
    with tempfile.TemporaryDirectory(dir="/run") as base, wired_ovs(Path(base) / "ovs") as ovs:
        for emulator, memory_kb in ((None, MEMORY_KB), (None, ODD_KB), (fetch().emulator, MEMORY_KB)):
            found = []
            for _ in range(runs):
                with tempfile.TemporaryDirectory(dir=base) as directory:
                    found.append(migrated(Path(directory), emulator, memory_kb, ovs))
            pages = [each.pages for each in found]
            lost = f"{min(pages)} to {max(pages)}"
            rings = str(max(each.of_rings for each in found))
            cells = [
                version(emulator),
                str(memory_kb),
                str(runs),
                str(len(pages) - pages.count(0)),
                lost,
                rings,
            ]
            print(row(cells), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
