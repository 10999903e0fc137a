"""What a stateful batch of TRex printed (``t-rex-64 -f FILE -m X -d S``), as a measurement.

Traps, each seen with TRex 3.08:

- The exit status is 0 whatever was dropped, and ``Total-pkt-drop`` is 0 when TRex never sent.
- ``-d`` fixes how many frames are sent, not how long that takes: a slow port takes 94 s for 20 s.
- Frames dropped in the transmit queue are in ``Total-sw-err`` and ``Total_queue_drop``; the latter
  line is missing when it is 0.
- ``Expected-PPS`` is what was asked, and ``Total-PPS`` is a slow average: neither is a rate that was.
- Within a block the counters of two ports were not read at the same moment.
- The clock starts with the program, about 1.5 s before the traffic, and is printed to 0.1 s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from netplugin.acceptance.errors import GeneratorError
from netplugin.acceptance.values import Direction, Measurement

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BLOCK = "-Per port stats table"
_SUMMARY = "summary stats"
#: What the clock, printed to 0.1 s twice a second, may be off against the counters beside it.
_CLOCK_S = 0.5
#: And if the first blocks are missing, so that the start is unknown: up to this.
_START_S = 2.5
#: First blocks come before this part of the frames was sent.
_EARLY = 0.2


@dataclass(frozen=True, slots=True)
class StfRun:
    """The counts of one run, after it ended."""

    sent: int
    received: int
    software_errors: int
    queue_drops: int
    queue_full: int
    #: By port: what was sent, received, and lost by the port's own receiver.
    opackets: tuple[int, ...]
    ipackets: tuple[int, ...]
    ierrors: tuple[int, ...]
    oerrors: tuple[int, ...]
    #: While it ran: seconds of TRex's clock, frames sent until then.
    samples: tuple[tuple[float, int], ...]

    @property
    def elapsed(self) -> tuple[float, float]:
        """From the first frame to the last, and by how much that may be wrong, in seconds."""
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
        """Ports come in pairs: what one sends the other receives. None if that does not add up."""
        pairs = [(n, n ^ 1) for n in range(len(self.opackets)) if (n ^ 1) < len(self.opackets)]
        found = [Direction(self.opackets[a], self.ipackets[b]) for a, b in pairs]
        used = tuple(d for d in found if d.tx_packets or d.rx_packets)
        sums = (sum(d.tx_packets for d in used), sum(d.rx_packets for d in used))
        return used if sums == (self.sent, self.received) else ()


def parse_stf(text: str) -> StfRun:
    """Raises: GeneratorError if the run has no summary: it did not end by itself."""
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
    """Of a run that was stopped because it was late: such a run prints no summary, and is no trial.

    Raises: GeneratorError if it printed nothing at all.
    """
    blocks = _ANSI.sub("", text).split(_BLOCK)[1:]
    clock, sent = _samples(blocks)[-1]
    return Measurement(
        tx_packets=sent,
        # The ports were not read at the same moment, and the rest was still to come.
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
    """A cumulative count that is not printed while it is 0."""
    return max(map(int, re.findall(rf"{name}\s*:\s*(\d+)", text)), default=0)


def _of_ports(text: str, name: str) -> tuple[int, ...]:
    """The last count of each port, from the list after the run."""
    counts: dict[int, int] = {}
    for port, body in re.findall(r"^port : (\d+) \n-+\n((?: .*\n)+)", text, re.MULTILINE):
        match = re.search(rf"^ {name}\s*:\s*(-?\d+)", body, re.MULTILINE)
        if match:
            counts[int(port)] = int(match[1])
    return tuple(counts[port] for port in sorted(counts))


def _row(blocks: list[str], name: str) -> tuple[int, ...]:
    """A row of the last table that was printed while it ran."""
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
