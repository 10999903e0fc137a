"""The generator ``trex-stf``: one stateful TRex batch per trial, the method of published comparisons.

Observed with TRex 3.08, next to what docs/zeroloss/generators.md says of its results:

- The exit status is 0 regardless of drops, and ``Total-pkt-drop`` is 0 if TRex never sent.
- Frames dropped in the transmit queue are also in ``Total_queue_drop``, which is missing when it is 0.
- ``Expected-PPS`` is the configured rate and ``Total-PPS`` a slow average: neither is the actual rate.
- Within a block the counters of two ports were not read at the same time.
- The clock starts with the program, about 1.5 s before the traffic.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from netplugin.programs import bounded
from netplugin_zeroloss.generators import contract
from netplugin_zeroloss.generators.contract import Look, elapsed
from netplugin_zeroloss.generators.frames import Mac
from netplugin_zeroloss.generators.owned_program import log_tail
from netplugin_zeroloss.generators.trex_program import PROGRAM, check_tree, started
from netplugin_zeroloss.machines import LocalMachine, MachineError, SshMachine, connect
from netplugin_zeroloss.values import Direction, GeneratorError, Measurement, TrialRequest, UnusableInput


class PortMacs(contract.GeneratorDescription):
    """MAC addresses of the frames that a port sends."""

    source_mac: Mac
    destination_mac: Mac


class TrexStf(contract.GeneratorDescription):
    """One stateful batch of TRex per trial: ``t-rex-64 -f PROFILE -m X -d S``, on ``machine``."""

    type: Literal["trex-stf"] = "trex-stf"
    machine: Annotated[LocalMachine | SshMachine, Field(discriminator="type")] = LocalMachine()
    #: Paths of the machine.
    trex_dir: Path
    #: None: TRex's default, /etc/trex_cfg.yaml.
    trex_cfg: Path | None = None
    #: Per port of the configuration, cyclic; empty: those of the configuration.
    macs: tuple[PortMacs, ...] = ()
    #: Relative to ``trex_dir``.
    profile: str = "cap2/imix_64_fast.yaml"
    #: Frames per second at ``-m 1``; None: reported by TRex in a short run.
    pps_per_m: contract.Positive | None = None
    #: Additional options for ``t-rex-64``, such as ``-c 4`` or ``-p``.
    arguments: tuple[str, ...] = ()
    max_pps: contract.Positive | None = None


# -- The output of a batch. -----------------------------------------------------------------------


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BLOCK: Final = "-Per port stats table"
_SUMMARY: Final = "summary stats"
_CLOCK: Final = r"current time\s*:\s*([\d.]+) sec"
#: Error of a clock that is printed every 0.5 s, with a resolution of 0.1 s, against the counters next to it.
_CLOCK_S: Final = 0.25
#: Seconds from the start of that clock to the first frame, for an output whose first part is missing: more
#: than this part of the frames was sent before.
_START_S: Final = 2.25
_EARLY: Final = 0.2
_UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@contextlib.contextmanager
def _as_printed() -> Iterator[None]:
    """Raises: GeneratorError for numbers that are none, as in output that another program has torn."""
    try:
        yield
    except (LookupError, OverflowError, ValueError) as error:
        raise GeneratorError(f"{PROGRAM} printed what cannot be read: {str(error)[:200]}") from error


@_as_printed()
def parse_stf(text: str) -> Measurement:
    """Parse a finished run. Raises: GeneratorError if there is no summary, so the run was interrupted."""
    text = _ANSI.sub("", text)
    _, found, summary = text.rpartition(_SUMMARY)
    if not found:
        raise GeneratorError(f"{PROGRAM} printed no summary; its last words:\n{log_tail(text)}")
    blocks = text.split(_BLOCK)[1:]
    totals = dict(re.findall(r"^[ \t]*([\w-]+)[ \t]*:\s*(-?\d+)", summary, re.MULTILINE))
    sent, received, errors = (int(totals[f"Total-{name}"]) for name in ("tx-pkt", "rx-pkt", "sw-err"))
    elapsed_s, uncertainty_s = elapsed(_looks(blocks), sent)
    drops = max(errors, _largest(text, "Total_queue_drop"))
    rx_errors = sum(_row(blocks, "ierrors"))
    run = Measurement(
        sent,
        received,
        elapsed_s,
        rx_errors=rx_errors,
        queue_drops=drops + sum(_row(blocks, "oerrors")),
        queue_full=_largest(text, "Total_queue_full"),
        elapsed_uncertainty_s=uncertainty_s,
        evidence={"generator.rx": rx_errors, "generator.queue": drops},
    )
    ways = tuple(_directions(text))
    bounded.check([*astuple(run), *map(astuple, ways)])
    # What does not add up to the totals is left out.
    return replace(run, directions=ways if Direction.total(ways) == Direction(sent, received) else ())


@_as_printed()
def parse_interrupted(text: str, asked_packets: float) -> Measurement:
    """Parse a run that was stopped because it was late. It has no summary and is an invalid trial.

    Raises: GeneratorError if it printed no statistics.
    """
    blocks = _ANSI.sub("", text).split(_BLOCK)[1:]
    last = _looks(blocks)[-1]
    sent = last.sent
    return Measurement(
        tx_packets=sent,
        # The ports were read at different times, and frames were still in flight.
        rx_packets=min(sent, sum(_row(blocks, "ipackets"))),
        elapsed_s=last.at_s,
        tx_shortfall=max(0, round(asked_packets) - sent),
        rx_errors=sum(_row(blocks, "ierrors")),
        elapsed_uncertainty_s=last.doubt_s,
    )


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
    found = re.findall(_CLOCK, text)
    return float(found[-1]) if found else 0.0


def _directions(text: str) -> Iterator[Direction]:
    """Pair the ports of the list after the run: each receives what its neighbour sends, if anything."""
    printed = re.findall(r"^port : (\d+) \n-+\n((?: .*\n)+)", text, re.MULTILINE)
    # The last is that of the end.
    counts = re.compile(r"^ (\w+)\s*:\s*(-?\d+)", re.MULTILINE)
    ports = {int(number): dict(counts.findall(body)) for number, body in printed}
    for number in sorted(ports):
        if (other := number ^ 1) in ports:
            found = Direction(int(ports[number]["opackets"]), int(ports[other]["ipackets"]))
            if found.tx_packets or found.rx_packets:
                yield found


def _largest(text: str, name: str) -> int:
    """Return a cumulative counter, which is not printed while it is 0."""
    return max(map(int, re.findall(rf"{name}\s*:\s*(\d+)", text)), default=0)


def _row(blocks: Sequence[str], name: str) -> list[int]:
    """Return a row of the last table printed during the run."""
    for block in reversed(blocks):
        match = re.search(rf"^[ \t]*{name} \|(.*)$", block, re.MULTILINE)
        if match:
            return [int(cell) for cell in match[1].split("|") if cell.strip()]
    return []


def _looks(blocks: Sequence[str]) -> list[Look]:
    found = ((re.search(_CLOCK, block), _row([block], "opackets")) for block in blocks)
    looks = [Look(float(clock[1]), _CLOCK_S, sum(sent)) for clock, sent in found if clock and sent]
    if not looks:
        raise GeneratorError(f"{PROGRAM} printed no statistics while it ran")
    if looks[0].sent > _EARLY * looks[-1].sent:
        return [Look(0.0, _START_S, 1), *looks]
    return looks


# -- The generator. -------------------------------------------------------------------------------


#: The TRex clock is accurate to 0.5 s, which is too much for a shorter trial.
_MIN_TRIAL_S: Final = 10.0
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
#: What t-rex-64 takes without --cfg.
_DEFAULT_CFG: Final = Path("/etc/trex_cfg.yaml")


class TrexStfGenerator(contract.Generator):
    """Runs ``t-rex-64`` for each trial. The profile defines frames and flows; the request does not."""

    def __init__(self, description: TrexStf) -> None:
        """Raises: UnusableInput."""
        self._description = description
        self._pps_per_m = description.pps_per_m
        where, deadline = description.machine, time.monotonic() + _CONNECT_S
        with ExitStack() as opened:
            try:
                self._machine = connect(where, deadline)
                opened.callback(self._machine.close)
                self._configuration = self._checked()
            except MachineError as error:
                raise UnusableInput("--trex-ssh", str(error)) from error
            self._opened = opened.pop_all()
        self._info = contract.GeneratorInfo(
            f"TRex stateful ({description.profile})",
            description.max_pps or math.inf,
            can_abort=False,
            min_trial_s=_MIN_TRIAL_S,
        )

    def run(self, request: TrialRequest) -> Measurement:
        if self._pps_per_m is None:
            self._pps_per_m = self._probe()
        text, ended = self._batch(request.rate_pps / self._pps_per_m, request.duration_s)
        return parse_stf(text) if ended else parse_interrupted(text, request.packets)

    def _checked(self) -> list[str]:
        """Check the files of the run; returns the arguments that name the configuration."""
        machine, chosen = self._machine, self._description
        check_tree(machine, chosen.trex_dir)
        if not machine.has("-f", chosen.trex_dir / chosen.profile):
            raise UnusableInput("--trex-profile", f"{chosen.trex_dir / chosen.profile}: no such file")
        if chosen.trex_cfg is None and not chosen.macs:
            return []
        given = chosen.trex_cfg or _DEFAULT_CFG
        if not machine.has("-f", given):
            raise UnusableInput("--trex-cfg", f"{given}: no such file")
        if not chosen.macs:
            return ["--cfg", machine.run(["realpath", str(given)]).strip()]
        path = f"{machine.directory}/trex_cfg.yaml"
        machine.write(path, with_macs(machine.run(["cat", str(given)]), chosen.macs, str(given)))
        return ["--cfg", path]

    def _batch(self, multiplier: float, duration_s: float) -> tuple[str, bool]:
        """Run one batch; returns its output and whether it ended by itself. A late batch is interrupted."""
        chosen = self._description
        how = ["-f", chosen.profile, "-m", f"{multiplier:.9f}", "-d", f"{duration_s:.3f}"]
        arguments = [*how, *self._configuration, *chosen.arguments]
        late_s = duration_s * (1 + _LATE_PART) + _LATE_S
        deadline = time.monotonic() + _AROUND_S + late_s
        with closing(started(self._machine, chosen.trex_dir, arguments)) as program:
            while not program.wait(_LOOK_S):
                if clock_s(program.output) > late_s or time.monotonic() > deadline:
                    program.stop()
                    return program.output, False
            return program.output, True

    def _probe(self) -> float:
        """Measure the frames per second at ``-m 1``, to the printed precision. Raises: GeneratorError."""
        pps, mantissa = expected_pps(self._batch(_PROBE_M, _PROBE_S)[0])
        if mantissa >= _ENOUGH_DIGITS:
            return pps / _PROBE_M
        multiplier = _PROBE_M * _ENOUGH_DIGITS / max(mantissa, 1.0)
        pps, _ = expected_pps(self._batch(multiplier, _PROBE_S)[0])
        return pps / multiplier


def with_macs(text: str, macs: Sequence[PortMacs], where: str) -> str:
    """Return a TRex configuration with these MAC addresses (pure).

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
        {"src_mac": Quoted(one.source_mac), "dest_mac": Quoted(one.destination_mac)} for one in chosen
    ]
    parser.dump(whole, out)
    return out.getvalue()
