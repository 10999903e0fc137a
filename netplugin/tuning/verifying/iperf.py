"""Measure TCP with iperf3: between two VMs and on this host's loopback device, with its cost in CPUs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from netplugin.api.errors import HostError, OperationTimeout
from netplugin.host.processes import printable
from netplugin.programs import bounded
from netplugin.programs.polling import polled
from netplugin.programs.program import Program, own_directory
from netplugin.tuning.verifying.result import TCP_VARIANTS, Tcp, TcpSample, TcpSettings, TcpVariant, tcp_words
from netplugin.tuning.verifying.shell import GuestShell, HostShell, Shell, as_host_errors
from netplugin.tuning.verifying.vm import MACS, Say

STEP = "iperf3"
#: Seconds at the start that are not counted: TCP's slow start.
_OMIT_S = 1
#: Seconds for start and end, in addition to the measurement: here, and in a VM, which is slow without KVM.
_MARGIN_S, _VM_MARGIN_S = 30.0, 120.0
_LOOK_S = 0.5
_LOOPBACK = "127.0.0.1"
#: Addresses of the VMs, for documentation (RFC 5737): their bridge leads nowhere; port of the receiver.
_ADDRESSES, _PORT = ("192.0.2.1", "192.0.2.2"), 5201
_STAT = Path("/proc/stat")
#: Columns of proc_pid_stat(5), "/proc/stat": user, nice, system; then irq and softirq. Guests are in user.
_BUSY = (0, 1, 2, 5, 6)


def busy_s(stat: Path = _STAT) -> float:
    """Seconds that the CPUs of this host were busy since its start, all programs and the kernel together."""
    columns = [int(word) for word in stat.read_text().splitlines()[0].split()[1:]]
    return sum(columns[n] for n in _BUSY) / os.sysconf("SC_CLK_TCK")


def measure(shells: Sequence[GuestShell], settings: TcpSettings, rounds: int, port: int, say: Say) -> Tcp:
    """Measure from the first VM to the second, and on the host, on ``port``. Raises: NetpluginError."""
    devices = [(shell, _device(shell, address)) for shell, address in zip(shells, MACS, strict=True)]
    for (shell, device), address in zip(devices, _ADDRESSES, strict=True):
        shell.run(["ip", "address", "replace", f"{address}/24", "dev", device])
    shells[1].run(["iperf3", "--server", "--daemon", "--port", str(_PORT)])
    listening = ["ss", "-Hltn", f"sport = :{_PORT}"]
    if not polled(lambda: shells[1].run(listening).strip(), bool, _VM_MARGIN_S, _LOOK_S):
        raise OperationTimeout("iperf3 does not listen in the VM", step=STEP)
    found: dict[tuple[int, bool], list[TcpSample]] = {variant: [] for variant in TCP_VARIANTS}
    host, versions = list[TcpSample](), set[str]()
    # Variant by variant within a round, so that a host that gets slower does so for all.
    for number in range(1, rounds + 1):
        for (mtu, lso), samples in found.items():
            say(f"TCP, VM to VM, {number} of {rounds}, {settings.streams} streams: {tcp_words(mtu, lso)}")
            state = "on" if lso else "off"
            for shell, device in devices:
                shell.run(["ip", "link", "set", "dev", device, "mtu", str(mtu), "up"])
                shell.run(["ethtool", "-K", device, "tso", state, "gso", state])
            version, sample = _sample(shells[0], _ADDRESSES[1], _PORT, settings, _VM_MARGIN_S)
            versions.add(version)
            samples.append(sample)
        say(f"TCP, this host's loopback device, {number} of {rounds}")
        host.append(on_loopback(settings, port))
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
        fix = "build the image with a kernel that has virtio_net"
        raise HostError(f"the VM has no NIC {address}", step=STEP, fix=fix)
    return names[0]


def on_loopback(settings: TcpSettings, port: int) -> TcpSample:
    """Measure between two processes of this host. Raises: HostError, OperationTimeout."""
    folder = own_directory()
    words = ["iperf3", "--server", "--bind", _LOOPBACK, "--port", str(port), "--forceflush"]
    server = Program("iperf3", words, folder / "log")
    try:
        with as_host_errors(STEP, f"see who listens on port {port}: ss -ltnp"):
            server.start()
            deadline = time.monotonic() + _MARGIN_S
            server.wait_for(lambda: server.logged("Server listening"), deadline, "it listens")
        return _sample(HostShell(), _LOOPBACK, port, settings, _MARGIN_S)[1]
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _sample(
    shell: Shell, address: str, port: int, settings: TcpSettings, margin_s: float
) -> tuple[str, TcpSample]:
    """Send once; return the version of iperf3, and the sample. Raises: HostError, OperationTimeout."""
    seconds = settings.window_s
    words = [
        *("iperf3", "--client", address, "--port", str(port), "--json", "--time", str(seconds)),
        *("--omit", str(_OMIT_S), "--parallel", str(settings.streams)),
    ]
    began, before = time.monotonic(), busy_s()
    text = shell.run(words, seconds + _OMIT_S + margin_s)
    busy = (busy_s() - before) / (time.monotonic() - began)
    try:
        whole = bounded.parse(text)
        if "error" in whole:
            raise ValueError(whole["error"])
        if (streams := len(whole["end"]["streams"])) != settings.streams:
            raise ValueError(f"{streams} streams, and not {settings.streams}")
        if (rate := float(whole["end"]["sum_received"]["bits_per_second"])) <= 0:
            raise ValueError(f"{rate} bits per second")
        return str(whole["start"]["version"])[:40], TcpSample(bits_per_s=rate, busy_cpus=busy)
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        why = printable(str(wrong))[:300] if isinstance(wrong, ValueError) else "fields are missing"
        why = f"what iperf3 printed {shell.where} cannot be made sense of: {why}"
        raise HostError(why, step=STEP, fix="install iperf3 3.12 or later there") from wrong
