"""Measure TCP between two VMs with iperf3: at MTU 1,500 and 9,000, with and without LSO, and its CPU cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from netplugin.api.errors import HostError, OperationTimeout
from netplugin.programs import bounded
from netplugin.programs.polling import polled
from netplugin.tuning.verifying import iperf
from netplugin.tuning.verifying.guest.machine import STEP, mac
from netplugin.tuning.verifying.guest.shell import GuestShell
from netplugin.tuning.verifying.result import TCP_VARIANTS, Tcp, TcpSample, TcpSettings, TcpVariant, tcp_words

Say = Callable[[str], None]

#: What the VM needs, and the packages.
PROGRAMS = (("iperf3", "iperf3"), ("ethtool", "ethtool"))
#: Addresses for documentation (RFC 5737): the bridge leads nowhere.
_ADDRESSES = ("192.0.2.1", "192.0.2.2")
_PORT = 5201
#: Seconds for start and end, in addition to the measurement: a VM without KVM is slow.
_MARGIN_S = 120.0
_LOOK_S = 0.5


def measure(
    shells: Sequence[GuestShell], settings: TcpSettings, rounds: int, loopback_port: int, say: Say
) -> Tcp:
    """Measure from the first VM to the second, and on the host. Raises: NetpluginError."""
    devices = [_device(shell, mac(number)) for number, shell in enumerate(shells)]
    for shell, device, address in zip(shells, devices, _ADDRESSES, strict=True):
        shell.run(["ip", "address", "replace", f"{address}/24", "dev", device])
    _serve(shells[1])
    found: dict[tuple[int, bool], list[TcpSample]] = {variant: [] for variant in TCP_VARIANTS}
    host: list[TcpSample] = []
    versions: set[str] = set()
    # Variant by variant within a round, so that a host that gets slower does so for all.
    for number in range(1, rounds + 1):
        for mtu, lso in TCP_VARIANTS:
            say(f"TCP, VM to VM, {number} of {rounds}, {settings.streams} streams: {tcp_words(mtu, lso)}")
            for shell, device in zip(shells, devices, strict=True):
                _set(shell, device, mtu, lso)
            version, sample = _sample(shells[0], settings)
            versions.add(version)
            found[mtu, lso].append(sample)
        say(f"TCP, this host's loopback device, {number} of {rounds}")
        host.append(iperf.on_loopback(settings, loopback_port)[1])
    return Tcp(
        program=", ".join(sorted(versions)),
        settings=settings,
        between=tuple(TcpVariant(mtu=m, lso=lso, samples=tuple(s)) for (m, lso), s in found.items()),
        host=tuple(host),
    )


def _device(shell: GuestShell, address: str) -> str:
    """Return the name of the NIC with this MAC address in the VM. Raises: HostError."""
    printed = shell.run(["ip", "-json", "link", "show"])
    try:
        names = [str(link["ifname"]) for link in bounded.parse(printed) if link.get("address") == address]
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise HostError("what ip printed in the VM cannot be made sense of", step=STEP) from wrong
    if len(names) != 1:
        raise HostError(
            f"the VM has no NIC {address}", step=STEP, fix="build the image with a kernel that has virtio_net"
        )
    return names[0]


def _set(shell: GuestShell, device: str, mtu: int, lso: bool) -> None:
    shell.run(["ip", "link", "set", "dev", device, "mtu", str(mtu), "up"])
    state = "on" if lso else "off"
    shell.run(["ethtool", "-K", device, "tso", state, "gso", state])


def _serve(shell: GuestShell) -> None:
    """Start the receiver, and wait until it listens. Raises: OperationTimeout."""
    shell.run(["iperf3", "--server", "--daemon", "--port", str(_PORT)])
    listening = ["ss", "-Hltn", f"sport = :{_PORT}"]
    if not polled(lambda: shell.run(listening).strip(), bool, _MARGIN_S, _LOOK_S):
        raise OperationTimeout("iperf3 does not listen in the VM", step=STEP)


def _sample(shell: GuestShell, settings: TcpSettings) -> tuple[str, TcpSample]:
    clock = iperf.BusyClock()
    command = iperf.client(_ADDRESSES[1], _PORT, settings)
    printed = shell.run(command, settings.window_s + iperf.OMIT_S + _MARGIN_S)
    busy = clock.cpus()
    version, rate = iperf.parsed(printed, settings, "in the VM")
    return version, TcpSample(bits_per_s=rate, busy_cpus=busy)
