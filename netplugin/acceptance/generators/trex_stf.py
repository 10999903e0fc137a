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

import re
from dataclasses import dataclass

from netplugin.acceptance.errors import GeneratorError
from netplugin.acceptance.values import Direction, Measurement

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BLOCK = "-Per port stats table"
_SUMMARY = "summary stats"
#: Error of the clock (printed every 0.5 s, resolution 0.1 s) against the counters beside it.
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


def parse_stf(text: str) -> StfRun:
    """Parse a finished run. Raises: GeneratorError if there is no summary, so the run was interrupted."""
    text = _ANSI.sub("", text)
    _, found, summary = text.rpartition(_SUMMARY)
    if not found:
        last = "\n".join(text.strip().splitlines()[-5:])
        raise GeneratorError(f"t-rex-64 printed no summary; its last words:\n{last}")
    blocks = text.split(_BLOCK)[1:]
    return StfRun(
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
    match = re.search(rf"^\s*{re.escape(name)}\s*:\s*(-?\d+)", summary, re.MULTILINE)
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
        match = re.search(rf"^\s*{name} \|(.*)$", block, re.MULTILINE)
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
