"""The generator ``trex-stl``: trials with the stateless TRex client."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.generators.contract import Generator, GeneratorInfo
from netplugin.acceptance.generators.frames import Frames, Vary, sizes
from netplugin.acceptance.generators.trex_stl import StlReading, measurement
from netplugin.acceptance.generators.trex_stl_client import StlClient, StlServer
from netplugin.acceptance.generators.watch import IN_FLIGHT, InFlight, LossWatch, at_rest
from netplugin.acceptance.values import Measurement, TrialRequest

#: Polling interval of the counters while sending, in seconds.
_LOOK_S: Final = 0.02
#: A trial this fraction of its duration plus ``_LATE_S`` late is stopped: it cannot catch up.
_LATE_PART: Final = 0.02
_LATE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StlPath:
    """Numbers of the transmitting and the receiving port, and the frames."""

    send: int
    receive: int
    frames: Frames


@dataclass(frozen=True, slots=True)
class StlProfile:
    """A Python file with ``register()``, and its arguments."""

    file: Path
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """Frames sent at ``at_s``, accurate to ``doubt_s`` seconds."""

    at_s: float
    doubt_s: float
    sent: int


class TrexStlGenerator(Generator):
    """Owns the ports of its paths from construction until ``close``."""

    def __init__(
        self, paths: Sequence[StlPath], server: StlServer, trex_dir: Path | None,
        profile: StlProfile | None = None, max_pps: float | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        """``trex_dir`` None: the installed client package. ``in_flight``: frames the device may hold.

        Raises: UnusableInput, GeneratorError.
        """
        if profile is not None and not profile.file.is_file():
            raise UnusableInput("--trex-profile", f"{profile.file}: no such file")
        self._paths = [
            replace(path, frames=path.frames.in_direction(number))
            for number, path in enumerate(paths)
        ]
        self._pairs = [(path.send, path.receive) for path in paths]
        self._senders = [path.send for path in paths]
        self._profile = profile
        self._loaded: object = None
        self._in_flight = InFlight(in_flight)
        ports = sorted({port for pair in self._pairs for port in pair})
        self._client = StlClient(server, trex_dir, ports)
        speeds = self._client.speeds_gbps
        self._info = GeneratorInfo(
            f"TRex {self._client.version} stateless ({', '.join(self._client.drivers)})",
            max_pps or math.inf,
            line_bps=1e9 * sum(speeds[port] for port in self._senders) or math.inf,
        )

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        self._load(request)
        before, _ = at_rest(self._counts, lambda _: True, 0.0)
        looks, aborted = self._send(request, before)
        after, settled = at_rest(self._counts, lambda now: _complete(self._between(before, now)))
        total = self._between(before, after).tx_packets
        elapsed_s, doubt_s = elapsed(looks, total)
        measured = self._between(before, after, elapsed_s, doubt_s, settled)
        if aborted and measured.tx_packets == measured.rx_packets:
            self._in_flight.was_more()
        return replace(measured, aborted=aborted)

    def close(self) -> None:
        self._client.close()

    def _load(self, request: TrialRequest) -> None:
        """Load the streams, unless they are loaded already."""
        wanted = self._profile or (request.frame_size, request.mix, request.flows)
        if wanted == self._loaded:
            return
        self._loaded = None
        if self._profile is not None:
            self._client.tell(
                "profile", file=str(self._profile.file.resolve()), ports=self._senders,
                arguments=list(self._profile.arguments),
            )  # fmt: skip
        else:
            self._client.tell("load", streams=list(_streams(self._paths, request)))
        self._loaded = wanted

    def _send(self, request: TrialRequest, before: StlReading) -> tuple[list[Look], bool]:
        """Run the traffic until all is sent, the trial is late, or loss is certain.

        Returns: the samples, and True if it was stopped because of certain loss.
        """
        watches = [LossWatch(self._in_flight.packets) for _ in self._pairs]
        looks: list[Look] = []
        self._client.tell(
            "start", ports=self._senders, duration_s=request.duration_s,
            # TRex does not accept an exponent.
            mult=f"{request.rate_pps / len(self._pairs):.4f}pps",
        )  # fmt: skip
        late = time.monotonic() + request.duration_s * (1 + _LATE_PART) + _LATE_S
        while True:
            time.sleep(_LOOK_S)
            read = self._client.read()
            now = self._between(before, read.counts)
            at_s = (read.from_s + read.to_s) / 2
            looks.append(Look(at_s, (read.to_s - read.from_s) / 2, now.tx_packets))
            if not read.active:
                return looks, False
            lost = [
                watch.sees_loss(
                    at_s, d.tx_packets, d.rx_packets, request.rate_pps * (read.to_s - read.from_s)
                )
                for watch, d in zip(watches, now.directions, strict=True)
            ]
            if at_s > late or (request.abort_on_loss and any(lost)):
                self._client.tell("stop")
                return looks, at_s <= late

    def _between(
        self, before: StlReading, after: StlReading, elapsed_s: float = 0.0, doubt_s: float = 0.0,
        settled: bool = True,
    ) -> Measurement:  # fmt: skip
        return measurement(before, after, self._pairs, elapsed_s, doubt_s, settled)

    def _counts(self) -> StlReading:
        return self._client.read().counts


def elapsed(looks: Sequence[Look], total: int) -> tuple[float, float]:
    """Return the seconds from the first frame to the last, and their uncertainty (pure).

    Extrapolates the rate between the first and the last sample with traffic to all frames.
    """
    moving = [look for look in looks if 0 < look.sent < total]
    if len(moving) < 2 or moving[0].sent == moving[-1].sent:
        # Too short for two samples: somewhere within the polled time.
        span = looks[-1].at_s - looks[0].at_s if looks else 0.0
        return span / 2, span / 2 + _LOOK_S
    first, last = moving[0], moving[-1]
    seconds = total * (last.at_s - first.at_s) / (last.sent - first.sent)
    stretch = seconds / (last.at_s - first.at_s)
    return seconds, (first.doubt_s + last.doubt_s) * stretch


def _complete(counted: Measurement) -> bool:
    return all(d.rx_packets >= d.tx_packets for d in counted.directions)


def _streams(paths: Sequence[StlPath], request: TrialRequest) -> Iterator[Mapping[str, Any]]:
    """Yield one stream per size and path; ``pps`` is its relative share of the started load."""
    for path in paths:
        frames = path.frames
        frames.check(request.flows)
        field, field_bytes, first = {
            Vary.SOURCE_IP: ("IP.src", 4, int(frames.source_ip or 0)),
            Vary.DESTINATION_IP: ("IP.dst", 4, int(frames.destination_ip or 0)),
            Vary.SOURCE_PORT: ("UDP.sport", 2, frames.source_port),
            Vary.DESTINATION_PORT: ("UDP.dport", 2, frames.destination_port),
        }[frames.vary]
        for size, share in Counter(sizes(request)).items():
            yield {
                "port": path.send, "size": size, "pps": share, "flows": request.flows,
                "field": field, "field_bytes": field_bytes, "first": first,
                "source_mac": frames.source_mac, "destination_mac": frames.destination_mac,
                "source_ip": str(frames.source_ip), "destination_ip": str(frames.destination_ip),
                "source_port": frames.source_port, "destination_port": frames.destination_port,
            }  # fmt: skip
