"""A real guest: a libvirt domain that boots Debian's kernel and obeys commands on a serial port.

The kernel's messages go to the first serial port, a file; commands and answers to the second,
a unix socket, so that neither can garble the other.
"""

from __future__ import annotations

import base64
import itertools
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import libvirt  # type: ignore[import-untyped]
from lxml import etree

from tests.lab import initramfs, kernel
from tests.lab.accelerator import COMMAND_LINE, EMULATOR, Accelerator, accelerator
from tests.lab.kernel import Kernel
from tests.lab.processes import LabError, LabTimeout, tail_of, wait_for

GUESTS = Path("/run/lab-guests")
BOOT_DEADLINE_S = 180.0
# Beyond the time a command has in the guest: for the guest and the host to be slow in.
CHANNEL_SLACK_S = 60.0
#: More memory of a guest that migrates, so that it is no multiple of 256 KiB; QEMU rounds it to this.
MORE_KIB = 8
QEMU_NS = "http://libvirt.org/schemas/domain/qemu/1.0"


class Result(NamedTuple):
    """What a command in a guest came to; output is stdout and stderr together."""

    status: int
    output: str


@dataclass(frozen=True, slots=True)
class GuestFiles:
    """Where a guest's files are."""

    directory: Path
    name: str

    @property
    def console(self) -> Path:
        return self.directory / f"{self.name}.console"

    @property
    def channel(self) -> Path:
        return self.directory / f"{self.name}.sock"

    @property
    def initramfs(self) -> Path:
        return self.directory / "initramfs"


@dataclass(frozen=True, slots=True)
class System:
    """The kernel of a guest, and its modules in the order in which they are loaded."""

    kernel: Kernel
    modules: tuple[str, ...] = initramfs.MODULES


def domain_xml(
    name: str,
    vcpus: int = 1,
    memory_mb: int = 128,
    directory: Path = GUESTS,
    accel: Accelerator | None = None,
    spare_slots: int = 0,
    system: System | None = None,
) -> str:
    """A minimal domain without interfaces, to which a test adds what it is about.

    `spare_slots` is how many devices can be plugged in while it runs.
    """
    system = system or System(kernel.cached())
    files = GuestFiles(directory, name)
    root = "<controller type='pci' model='pcie-root'/>"
    spare = "<controller type='pci' model='pcie-root-port'/>" * spare_slots
    accel = accel or accelerator()
    cpu = "host-passthrough" if accel is Accelerator.KVM else "maximum"
    return f"""<domain type='{accel}'>
  <name>{name}</name>
  <memory unit='MiB'>{memory_mb}</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{system.kernel.image}</kernel>
    <initrd>{files.initramfs}</initrd>
    <cmdline>{COMMAND_LINE}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='{cpu}'/>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>{EMULATOR}</emulator>
    <controller type='usb' model='none'/>
    {root}{spare}
    <serial type='file'><source path='{files.console}'/><target port='0'/></serial>
    <serial type='unix'>
      <source mode='bind' path='{files.channel}'/><target port='1'/>
    </serial>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def with_shared_memory(xml: str) -> str:
    """The domain with guest memory that a vhost-user process can map (memfd, shared)."""
    domain = etree.fromstring(xml)
    backing = etree.SubElement(domain, "memoryBacking")
    etree.SubElement(backing, "source", type="memfd")
    etree.SubElement(backing, "access", mode="shared")
    return _written(domain)


def with_interface(xml: str, interface_xml: str) -> str:
    """The domain with one more device."""
    domain = etree.fromstring(xml)
    devices = domain.find("devices")
    if devices is None:
        raise LabError("the domain has no <devices>")
    devices.append(etree.fromstring(interface_xml))
    return _written(domain)


def apply_tcg_workaround(xml: str, migrates: bool = False) -> str:
    """The domain as QEMU 7.2 runs it under TCG with vhost-user NICs; unchanged if KVM runs it.

    QEMU 7.2 crashes under TCG when a vhost-user device uses MSI-X, so they have `vectors=0`. NICs
    plugged in later get the default, which must be 0 too; libvirt overrides it if they have several
    queues, so such a NIC cannot be plugged in under TCG.

    Of a guest with one vCPU it leaves out the memory barriers (`tcg_gen_mb`, until 8.1), as if nobody
    else had the memory. So guest and vswitchd can miss each other's last write of a ring; no interrupt
    follows then, and the NIC never receives again. With room for a second vCPU all barriers are there;
    a domain with a topology has no such room.

    ``migrates``: also with a little more memory, without which QEMU 7.2 loses some of it under
    TCG (`tests.bench.copied_memory`). libvirt rounds to MiB, so this is memory beside libvirt's own.
    """
    domain = etree.fromstring(xml)
    if domain.get("type") == Accelerator.KVM:
        return xml
    # libvirt looks for the namespace on the root.
    root = etree.Element(domain.tag, dict(domain.attrib), nsmap={"qemu": QEMU_NS})
    root.extend(each for each in domain if each.tag not in (_name("override"), _name("commandline")))
    vcpus = root.find("vcpu")
    if vcpus is not None and vcpus.text == "1" and root.find("cpu/topology") is None:
        vcpus.set("current", vcpus.text)
        vcpus.text = "2"
    for number, nic in enumerate(root.findall("devices/interface[@type='vhostuser']")):
        device = etree.SubElement(_qemu(root, "override"), _name("device"))
        device.set("alias", _own_alias(nic, f"ua-nic{number}"))
        frontend = etree.SubElement(device, _name("frontend"))
        settings = {"name": "vectors", "type": "unsigned", "value": "0"}
        etree.SubElement(frontend, _name("property"), settings)
    words = ["-global", "virtio-net-pci.vectors=0"]
    if migrates:
        kib = _memory_kib(root) + MORE_KIB
        words += ["-object", f"memory-backend-memfd,id=odd,share=on,size={kib}k"]
        words += ["-machine", "memory-backend=odd", "-m", f"{kib}k"]
    for word in words:
        etree.SubElement(_qemu(root, "commandline"), _name("arg"), value=word)
    return _written(root)


def _memory_kib(domain: etree._Element) -> int:
    memory = domain.find("memory")
    if memory is None or memory.text is None:
        raise LabError("the domain has no <memory>")
    return int(memory.text) * {"KiB": 1, "MiB": 1024}[memory.get("unit", "KiB")]


def _name(local: str) -> str:
    return f"{{{QEMU_NS}}}{local}"


def _qemu(root: etree._Element, local: str) -> etree._Element:
    """The domain's element of that name in QEMU's namespace, made if it is not there."""
    found = root.find(_name(local))
    return etree.SubElement(root, _name(local)) if found is None else found


def _own_alias(nic: etree._Element, name: str) -> str:
    """The NIC's alias, given if it has none that libvirt would keep (`ua-` marks a user's)."""
    alias = nic.find("alias")
    if alias is None:
        alias = etree.SubElement(nic, "alias")
    if not alias.get("name", "").startswith("ua-"):
        alias.set("name", name)
    return alias.get("name", "")


def _written(element: etree._Element) -> str:
    return etree.tostring(element, encoding="unicode", pretty_print=True)


class Guest:
    """One domain and the channel to the shell in it."""

    def __init__(
        self,
        name: str,
        directory: Path = GUESTS,
        programs: Mapping[str, bytes] | None = None,
        system: System | None = None,
    ) -> None:
        """``programs`` are more of what it has in /bin, by name. ``system`` is that of its domain."""
        self.name = name
        self._system = system
        self._programs = dict(programs or {})
        self.files = GuestFiles(directory, name)
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None
        self._received = b""

    def start(self, connection: libvirt.virConnect, xml: str, persistent: bool = False) -> libvirt.virDomain:
        """Start the domain; it runs once the host's end of the channel is connected."""
        self.close()
        self.prepare()
        paused = libvirt.VIR_DOMAIN_START_PAUSED
        if persistent:
            domain = connection.defineXML(xml)
            domain.createWithFlags(paused)
        else:
            domain = connection.createXML(xml, paused)
        self.attach()
        domain.resume()
        return domain

    def prepare(self) -> None:
        """Write what the domain boots, for one that something else starts (then `attach`)."""
        self.files.directory.mkdir(parents=True, exist_ok=True)
        # Renamed into place: another guest may be booting from it.
        draft = self.files.directory / f"{self.name}.initramfs"
        system = self._system or System(kernel.cached())
        draft.write_bytes(initramfs.build(system.kernel, system.modules, programs=self._programs))
        draft.replace(self.files.initramfs)

    def attach(self) -> None:
        """Connect to the channel of a domain that has been started."""
        self.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(self.files.channel))
        self._received = b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def boot(self, deadline_s: float = BOOT_DEADLINE_S) -> None:
        """Wait until the shell in the guest is ready."""
        end = time.monotonic() + deadline_s
        while self._line(end, "the guest boots") != initramfs.READY:
            pass
        status, output = self.run("true", max(1.0, end - time.monotonic()))
        if status != 0:
            raise LabError(f"guest {self.name}: `true` ended with {status}: {output}")

    def run(self, command: str, timeout: float = 90.0) -> Result:
        """Run a shell command in the guest; one that takes longer is killed there (status 137)."""
        if self._socket is None:
            raise LabError(f"guest {self.name} is not started")
        number = next(self._numbers)
        seconds = max(1, round(timeout))
        encoded = base64.b64encode(command.encode()).decode()
        end = time.monotonic() + seconds + CHANNEL_SLACK_S
        self._socket.settimeout(seconds + CHANNEL_SLACK_S)
        self._socket.sendall(f"lab {number} {seconds} {encoded}\n".encode())
        while True:
            words = self._line(end, f"`{command}`").split(" ")
            # Answers to commands that were given up are older, and skipped.
            if len(words) == 4 and words[:2] == ["lab", str(number)]:
                return Result(int(words[2]), base64.b64decode(words[3]).decode(errors="replace"))

    def check(self, command: str, timeout: float = 90.0) -> str:
        """`run` that raises if the command fails."""
        status, output = self.run(command, timeout)
        if status != 0:
            raise LabError(f"guest {self.name}: `{command}` ended with {status}: {output}")
        return output

    def nic(self, mac: str) -> str:
        """The name of the interface with this address."""
        found = self._nics(mac)
        if len(found) != 1:
            raise LabError(f"guest {self.name} has {len(found)} interfaces with {mac}")
        return found[0]

    def wait_nic(self, mac: str, deadline_s: float = 30.0) -> None:
        """Wait until a NIC that was plugged in is there."""
        what = f"guest {self.name} has a NIC with {mac}"
        wait_for(lambda: self._nics(mac), deadline_s, what, self.tail)

    def _nics(self, mac: str) -> list[str]:
        found = self.run(f"grep -il '^{mac}$' /sys/class/net/*/address").output.split()
        return [path.split("/")[4] for path in found]

    def configure(self, mac: str, address: str) -> str:
        """Set a NIC up with an address (as 10.0.0.1/24); returns its name."""
        name = self.nic(mac)
        self.check(f"ip link set {name} up && ip addr add {address} dev {name}")
        return name

    def pings(self, address: str, count: int = 3, wait_s: int = 30, size: int = 56) -> bool:
        """Whether every one of some pings is answered; ``size`` is the payload in bytes.

        One by one: of several, busybox waits for the last for a second only, if others were answered.
        """
        ping = f"ping -c 1 -W {wait_s} -s {size} {address}"
        pings = f"for i in $(seq {count}); do {ping} || exit 1; done"
        return self.run(pings, 60.0 + wait_s * count).status == 0

    def wait_pings(self, address: str, deadline_s: float = 90.0) -> None:
        """Wait until the address answers."""
        wait_for(
            lambda: self.run(f"ping -c 1 -W 1 {address}", 30.0).status == 0,
            deadline_s,
            f"guest {self.name} pings {address}",
            self.tail,
        )

    def tail(self) -> str:
        """The end of the guest's kernel messages."""
        return tail_of(self.files.console)

    def _line(self, end: float, what: str) -> str:
        if self._socket is None:
            raise LabError(f"guest {self.name} is not started")
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                more = self._socket.recv(65536)
            except TimeoutError as late:
                raise LabTimeout(f"guest {self.name}: {what}: too late\n{self.tail()}") from late
            if not more:
                raise LabError(f"guest {self.name}: {what}: QEMU has ended\n{self.tail()}")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")
