"""TCP with iperf3: its command, its output, CPUs that are busy meanwhile, and this host's loopback device."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from netplugin.api.errors import HostError
from netplugin.host.processes import needs_program, printable, run
from netplugin.programs import bounded
from netplugin.programs.program import Program, ProgramError, own_directory
from netplugin.tuning.verifying.result import TcpSample, TcpSettings

STEP = "iperf3"
#: Seconds at the start that are not counted: TCP's slow start.
OMIT_S = 1
_MARGIN_S = 30.0
_LOOPBACK = "127.0.0.1"


_STAT = Path("/proc/stat")
#: Columns of proc_pid_stat(5), "/proc/stat": user, nice, system; then irq and softirq. Guests are in user.
_BUSY = (0, 1, 2, 5, 6)


class BusyClock:
    """Counts the CPUs of this host that are busy, all programs and the kernel together, from its creation."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._began, self._before = time.monotonic(), self._busy_s()

    def cpus(self) -> float:
        """Return the mean number of busy CPUs since the creation."""
        return (self._busy_s() - self._before) / max(1e-9, time.monotonic() - self._began)

    def _busy_s(self) -> float:
        columns = [int(word) for word in self._stat.read_text().splitlines()[0].split()[1:]]
        return sum(columns[n] for n in _BUSY) / os.sysconf("SC_CLK_TCK")


def require() -> None:
    """Raises: BackendUnavailable."""
    needs_program("iperf3", "iperf3", STEP)


def client(address: str, port: int, settings: TcpSettings) -> list[str]:
    """Return the command of the sender."""
    return [
        *("iperf3", "--client", address, "--port", str(port), "--json"),
        *("--time", str(settings.window_s), "--omit", str(OMIT_S), "--parallel", str(settings.streams)),
    ]


def parsed(text: str, settings: TcpSettings, where: str) -> tuple[str, float]:
    """Return version and received bits per second. Raises: HostError."""
    try:
        whole = bounded.parse(text)
        if "error" in whole:
            raise ValueError(whole["error"])
        if (streams := len(whole["end"]["streams"])) != settings.streams:
            raise ValueError(f"{streams} streams, and not {settings.streams}")
        if (rate := float(whole["end"]["sum_received"]["bits_per_second"])) <= 0:
            raise ValueError(f"{rate} bits per second")
        return str(whole["start"]["version"])[:40], rate
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        why = printable(str(wrong))[:300] if isinstance(wrong, ValueError) else "fields are missing"
        raise HostError(
            f"what iperf3 printed {where} cannot be made sense of: {why}",
            step=STEP,
            fix="install iperf3 3.12 or later there",
        ) from wrong


def on_loopback(settings: TcpSettings, port: int) -> tuple[str, TcpSample]:
    """Measure between two processes of this host. Raises: HostError, OperationTimeout."""
    folder = own_directory()
    words = ["iperf3", "--server", "--bind", _LOOPBACK, "--port", str(port), "--forceflush"]
    server = Program("iperf3", words, folder / "log")
    try:
        server.start()
        deadline = time.monotonic() + _MARGIN_S
        server.wait_for(lambda: "Server listening" in server.log.read_text(), deadline, "it listens")
        clock = BusyClock()
        text = run(
            ["setpriv", "--pdeathsig", "KILL", "--", *client(_LOOPBACK, port, settings)],
            step=STEP,
            deadline=time.monotonic() + settings.window_s + OMIT_S + _MARGIN_S,
        )
        busy = clock.cpus()
    except ProgramError as error:
        raise HostError(str(error), step=STEP) from error
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    version, rate = parsed(text, settings, "on this host")
    return version, TcpSample(bits_per_s=rate, busy_cpus=busy)
