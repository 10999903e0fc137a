"""Parser for the output of a stateful TRex batch (``t-rex-64 -f FILE -m X -d S``).

Observed with TRex 3.08:

- The exit status is 0 regardless of drops, and ``Total-pkt-drop`` is 0 if TRex never sent.
- ``-d`` fixes the number of frames, not the duration: a slow port takes 94 s for 20 s.
- Frames dropped in the transmit queue are counted in ``Total-sw-err`` and ``Total_queue_drop``; the
  latter line is missing when it is 0.
- ``Expected-PPS`` is the configured rate and ``Total-PPS`` a slow average: neither is the actual rate.
- Within a block the counters of two ports were not read at the same time.
- The clock starts with the program, about 1.5 s before the traffic, and is printed with a resolution of
  0.1 s.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from netplugin.programs import bounded
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.generators.trex_program import PROGRAM, TrexProgram, check_tree, log_tail, there
from netplugin_zeroloss.machines import choose as machines
from netplugin_zeroloss.machines.contract import Connected, LocalMachine, MachineError, SshMachine
from netplugin_zeroloss.values import (
    Direction,
    GeneratorError,
    Measurement,
    TrialRequest,
    UnusableInput,
)

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BLOCK = "-Per port stats table"
_SUMMARY = "summary stats"
#: Error of the clock (printed every 0.5 s, resolution 0.1 s) against the counters next to it.
_CLOCK_S = 0.5
#: Error if the first blocks are missing, so that the start is unknown.
_START_S = 2.5
#: The first block must come before this fraction of the frames was sent.
_EARLY = 0.2


@dataclass(frozen=True, slots=True)
class StfRun:
    """Counters of one finished run."""

    sent: int
    received: int
    software_errors: int
    queue_drops: int
    queue_full: int
    #: Per port: sent, received, and lost by the port's own receiver.
    opackets: tuple[int, ...]
    ipackets: tuple[int, ...]
    ierrors: tuple[int, ...]
    oerrors: tuple[int, ...]
    #: Samples during the run: TRex clock in seconds, frames sent so far.
    samples: tuple[tuple[float, int], ...]

    @property
    def elapsed(self) -> tuple[float, float]:
        """Return the seconds from the first frame to the last, and their uncertainty."""
        (first, sent_first), (last, sent_last) = self.samples[0], self.samples[-1]
        pace = (sent_last - sent_first) / (last - first) if last > first else 0.0
        if pace <= 0:
            return last, _START_S
        end = last + max(0, self.sent - sent_last) / pace
        if sent_first > _EARLY * self.sent:
            return end, _START_S
        return end - (first - sent_first / pace), _CLOCK_S

    def measurement(self) -> Measurement:
        elapsed_s, uncertainty_s = self.elapsed
        directions = self._directions()
        return Measurement(
            tx_packets=self.sent,
            rx_packets=self.received,
            elapsed_s=elapsed_s,
            rx_errors=sum(self.ierrors),
            queue_drops=max(self.queue_drops, self.software_errors) + sum(self.oerrors),
            queue_full=self.queue_full,
            elapsed_uncertainty_s=uncertainty_s,
            directions=directions,
            evidence={
                "generator.rx": sum(self.ierrors),
                "generator.queue": max(self.queue_drops, self.software_errors),
            },
        )

    def _directions(self) -> tuple[Direction, ...]:
        """Pair the ports: each receives what its neighbour sends. Empty if the sums do not match."""
        pairs = [(n, n ^ 1) for n in range(len(self.opackets)) if (n ^ 1) < len(self.opackets)]
        found = [Direction(self.opackets[a], self.ipackets[b]) for a, b in pairs]
        used = tuple(d for d in found if d.tx_packets or d.rx_packets)
        sums = (sum(d.tx_packets for d in used), sum(d.rx_packets for d in used))
        return used if sums == (self.sent, self.received) else ()


@contextlib.contextmanager
def _as_printed() -> Iterator[None]:
    """Raises: GeneratorError for numbers that are none, as in output that another program has torn."""
    try:
        yield
    except (LookupError, OverflowError, ValueError) as error:
        raise GeneratorError(f"{PROGRAM} printed what cannot be read: {str(error)[:200]}") from error


@_as_printed()
def parse_stf(text: str) -> StfRun:
    """Parse a finished run. Raises: GeneratorError if there is no summary, so the run was interrupted."""
    text = _ANSI.sub("", text)
    _, found, summary = text.rpartition(_SUMMARY)
    if not found:
        last = "\n".join(text.strip().splitlines()[-5:])
        raise GeneratorError(f"t-rex-64 printed no summary; its last words:\n{last}")
    blocks = text.split(_BLOCK)[1:]
    run = StfRun(
        sent=_total(summary, "Total-tx-pkt"),
        received=_total(summary, "Total-rx-pkt"),
        software_errors=_total(summary, "Total-sw-err"),
        queue_drops=_largest(text, "Total_queue_drop"),
        queue_full=_largest(text, "Total_queue_full"),
        opackets=_of_ports(text, "opackets"),
        ipackets=_of_ports(text, "ipackets"),
        ierrors=_row(blocks, "ierrors"),
        oerrors=_row(blocks, "oerrors"),
        samples=_samples(blocks),
    )
    bounded.check(asdict(run))
    return run


@_as_printed()
def parse_interrupted(text: str, asked_packets: float) -> Measurement:
    """Parse a run that was stopped because it was late. It has no summary and is an invalid trial.

    Raises: GeneratorError if it printed no statistics.
    """
    blocks = _ANSI.sub("", text).split(_BLOCK)[1:]
    clock, sent = _samples(blocks)[-1]
    return Measurement(
        tx_packets=sent,
        # The ports were read at different times, and frames were still in flight.
        rx_packets=min(sent, sum(_row(blocks, "ipackets"))),
        elapsed_s=clock,
        tx_shortfall=max(0, round(asked_packets) - sent),
        rx_errors=sum(_row(blocks, "ierrors")),
        elapsed_uncertainty_s=_START_S,
    )


def _total(summary: str, name: str) -> int:
    match = re.search(rf"^[ \t]*{re.escape(name)}[ \t]*:\s*(-?\d+)", summary, re.MULTILINE)
    if match is None:
        raise GeneratorError(f"t-rex-64 printed no {name} in its summary")
    return int(match[1])


def _largest(text: str, name: str) -> int:
    """Return a cumulative counter, which is not printed while it is 0."""
    return max(map(int, re.findall(rf"{name}\s*:\s*(\d+)", text)), default=0)


def _of_ports(text: str, name: str) -> tuple[int, ...]:
    """Return the last value per port from the list after the run."""
    counts: dict[int, int] = {}
    for port, body in re.findall(r"^port : (\d+) \n-+\n((?: .*\n)+)", text, re.MULTILINE):
        match = re.search(rf"^ {name}\s*:\s*(-?\d+)", body, re.MULTILINE)
        if match:
            counts[int(port)] = int(match[1])
    return tuple(counts[port] for port in sorted(counts))


def _row(blocks: list[str], name: str) -> tuple[int, ...]:
    """Return a row of the last table printed during the run."""
    for block in reversed(blocks):
        match = re.search(rf"^[ \t]*{name} \|(.*)$", block, re.MULTILINE)
        if match:
            return tuple(int(cell) for cell in match[1].split("|") if cell.strip())
    return ()


def _samples(blocks: list[str]) -> tuple[tuple[float, int], ...]:
    samples = []
    for block in blocks:
        clock = re.search(r"current time\s*:\s*([\d.]+) sec", block)
        sent = _row([block], "opackets")
        if clock and sent:
            samples.append((float(clock[1]), sum(sent)))
    if not samples:
        raise GeneratorError("t-rex-64 printed no statistics while it ran")
    return tuple(samples)


# -- The generator ``trex-stf``: one stateful TRex batch per trial, the method of published comparisons.


#: The TRex clock is accurate to 0.5 s, which is too much for a shorter trial.
MIN_TRIAL_S: Final = 10.0
#: Seconds for start and end of the program, in addition to the trial.
_AROUND_S: Final = 90.0
#: A trial this fraction of its duration plus ``_LATE_S`` late is stopped: it cannot catch up.
_LATE_PART: Final = 0.05
_LATE_S: Final = 4.0
#: Multiplier and seconds of the run that measures the rate of ``-m 1``: low enough for any port.
_PROBE_M: Final = 0.01
_PROBE_S: Final = 3.0
#: Rates are printed with two decimals: an error of 0.005 % at this number.
_ENOUGH_DIGITS: Final = 100.0
_LOOK_S: Final = 1.0
#: Seconds to connect to the machine.
_CONNECT_S: Final = 10.0
_HERE: Final = LocalMachine()
#: What t-rex-64 takes without --cfg.
_DEFAULT_CFG: Final = Path("/etc/trex_cfg.yaml")
_UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class StfProfile:
    """``file`` is relative to the TRex directory. ``arguments``: additional options for ``t-rex-64``."""

    file: str = "cap2/imix_64_fast.yaml"
    #: None: TRex's default.
    configuration: Path | None = None
    arguments: tuple[str, ...] = ()
    #: Source and destination MAC address per port, in their order, cyclic; empty: those of the configuration.
    macs: tuple[tuple[str, str], ...] = ()


class TrexStfGenerator(Generator):
    """Runs ``t-rex-64`` for each trial. The profile defines frames and flows; the request does not."""

    def __init__(
        self,
        trex_dir: Path,
        profile: StfProfile,
        pps_per_m: float | None = None,
        max_pps: float = math.inf,
        machine: LocalMachine | SshMachine = _HERE,
    ) -> None:
        """``pps_per_m``: frames per second at ``-m 1``; None: measured in a short run before the first trial.

        ``machine`` has TRex; all paths are paths there.

        Raises: UnusableInput.
        """
        self._trex_dir = trex_dir
        self._profile = profile
        self._pps_per_m = pps_per_m
        self._program: TrexProgram | None = None
        try:
            self._machine = _connected(machine)
        except MachineError as error:
            raise UnusableInput("--trex-ssh", str(error)) from error
        try:
            self._configuration = self._checked()
        except MachineError as error:
            self._machine.close()
            raise UnusableInput("--trex-ssh", str(error)) from error
        except BaseException:
            self._machine.close()
            raise
        self._info = GeneratorInfo(
            f"TRex stateful ({profile.file})", max_pps, can_abort=False, min_trial_s=MIN_TRIAL_S
        )

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        if self._pps_per_m is None:
            self._pps_per_m = self._probe()
        text, ended = self._batch(request.rate_pps / self._pps_per_m, request.duration_s)
        if not ended:
            return parse_interrupted(text, request.packets)
        return parse_stf(text).measurement()

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._machine.close()

    def _checked(self) -> str | None:
        """Check the files of the run; returns the configuration to use, with the MAC addresses in it."""
        machine, profile = self._machine, self._profile
        check_tree(machine, self._trex_dir)
        if not there(machine, self._trex_dir / profile.file):
            raise UnusableInput("--trex-profile", f"{self._trex_dir / profile.file}: no such file")
        if profile.configuration is None and not profile.macs:
            return None
        given = profile.configuration or _DEFAULT_CFG
        if not there(machine, given):
            raise UnusableInput("--trex-cfg", f"{given}: no such file")
        if not profile.macs:
            return machine.run(["realpath", str(given)]).strip()
        path = f"{machine.directory}/trex_cfg.yaml"
        machine.write(path, with_macs(machine.run(["cat", str(given)]), profile.macs, str(given)))
        return path

    def _batch(self, multiplier: float, duration_s: float) -> tuple[str, bool]:
        """Run one batch; returns its output and whether it ended by itself. A late batch is interrupted."""
        profile = self._profile
        where = ["--cfg", self._configuration] if self._configuration else []
        arguments = [
            "-f",
            profile.file,
            "-m",
            f"{multiplier:.9f}",
            "-d",
            f"{duration_s:.3f}",
            *where,
            *profile.arguments,
        ]
        self._program = TrexProgram(self._machine, self._trex_dir, arguments)
        late_s = duration_s * (1 + _LATE_PART) + _LATE_S
        deadline = time.monotonic() + _AROUND_S + late_s
        try:
            while not self._program.wait(_LOOK_S):
                if clock_s(self._program.output) > late_s or time.monotonic() > deadline:
                    self._program.stop()
                    return self._program.output, False
            return self._program.output, True
        finally:
            self._program.close()

    def _probe(self) -> float:
        """Measure the frames per second at ``-m 1``, to the printed precision. Raises: GeneratorError."""
        pps, mantissa = expected_pps(self._batch(_PROBE_M, _PROBE_S)[0])
        if mantissa >= _ENOUGH_DIGITS:
            return pps / _PROBE_M
        multiplier = _PROBE_M * _ENOUGH_DIGITS / max(mantissa, 1.0)
        pps, _ = expected_pps(self._batch(multiplier, _PROBE_S)[0])
        return pps / multiplier


def _connected(description: LocalMachine | SshMachine) -> Connected:
    made = machines.make(description, time.monotonic() + _CONNECT_S)
    assert isinstance(made, Connected)
    return made


def with_macs(text: str, macs: Sequence[tuple[str, str]], where: str) -> str:
    """Return a TRex configuration with these source and destination MAC addresses (pure).

    Addresses and gateways of ports are dropped: TRex would resolve the destinations by ARP.
    Raises: UnusableInput if the text is no TRex configuration.
    """
    # Here, because `search` also runs without the dependencies of the distribution.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted

    # The rest stays as it is written: to other parsers, 0000:03:00.0 is a number.
    parser, out = YAML(), io.StringIO()
    parser.preserve_quotes = True
    try:
        whole = parser.load(text)
        [configuration] = whole
        ports = len(configuration["interfaces"])
    except (YAMLError, RecursionError, ValueError, KeyError, TypeError) as error:
        raise UnusableInput("--trex-cfg", f"{where} is no configuration of TRex: {error!r:.200}") from error
    chosen = [macs[number % len(macs)] for number in range(ports)]
    configuration["port_info"] = [
        {"src_mac": Quoted(source), "dest_mac": Quoted(destination)} for source, destination in chosen
    ]
    parser.dump(whole, out)
    return out.getvalue()


@_as_printed()
def expected_pps(text: str) -> tuple[float, float]:
    """Parse ``Expected-PPS``; returns the rate in pps and the number as printed, without its unit prefix.

    Raises: GeneratorError.
    """
    found = re.search(r"Expected-PPS\s*:\s*([\d.]+)\s+([KMG]?)pps", text)
    if found is None or float(found[1]) == 0:
        raise GeneratorError(f"{PROGRAM} did not say what it will send:\n{log_tail(text)}")
    return float(found[1]) * _UNITS[found[2]], float(found[1])


@_as_printed()
def clock_s(text: str) -> float:
    """Return the last printed TRex clock in seconds; 0 if none was printed. Raises: GeneratorError."""
    found = re.findall(r"current time\s*:\s*([\d.]+) sec", text)
    return float(found[-1]) if found else 0.0
