"""The generator ``trex-stl``: trials with the stateless TRex client in a child process."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from netplugin_zeroloss.generators.contract import (
    IN_FLIGHT,
    Generator,
    GeneratorInfo,
    InFlight,
    LossWatch,
    ProgressWatch,
    at_rest,
)
from netplugin_zeroloss.generators.dialogue import Dialogue
from netplugin_zeroloss.generators.frames import Frames, Vary, sizes
from netplugin_zeroloss.generators.trex_bursts import burst_s, in_bursts
from netplugin_zeroloss.generators.trex_latency import latency_streams, summary
from netplugin_zeroloss.generators.trex_program import TrexServer
from netplugin_zeroloss.values import (
    Direction,
    GeneratorError,
    LatencySummary,
    Measurement,
    TrialRequest,
    UnusableInput,
)

# -- Converts counters of the stateless TRex client (``get_stats``, global statistics) to a measurement.
# Observed with TRex 3.08:
#
# - ``duration`` fixes the number of frames, not the duration: 5 s at 8 Mpps took 14.7 s.
# - ``ierrors`` of the receiving port are frames that the generator itself lost.
# - A full transmit queue drops (``low_end``) or retries. Only the global statistics show it:
#   ``m_total_queue_drop``, ``m_total_queue_full``. They are never cleared: take the difference.
# - ``tx_pps`` and similar values are slow averages. Rates are computed from counters and elapsed time.
# - Loss is computed from port counters. Per-stream counters are read on another core and are late.


@dataclass(frozen=True, slots=True)
class StlReading:
    """Counters of all ports, and global counters, at one moment."""

    opackets: Mapping[int, int]
    ipackets: Mapping[int, int]
    ierrors: Mapping[int, int]
    oerrors: Mapping[int, int]
    queue_drops: int
    queue_full: int

    @staticmethod
    def parse(stats: Mapping[Any, Any], raw_global: Mapping[str, Any]) -> StlReading:
        """Parse the results of ``get_stats()`` and of the RPC ``get_global_stats``.

        Port numbers are integers in Python and strings after JSON.
        Raises: GeneratorError.
        """
        try:
            ports = {int(name): port for name, port in stats.items() if str(name).isdecimal()}
            if not ports:
                raise GeneratorError("TRex's statistics have no port")
            counts = {
                name: {number: int(port[name]) for number, port in ports.items()}
                for name in ("opackets", "ipackets", "ierrors", "oerrors")
            }
            return StlReading(
                **counts,
                queue_drops=int(raw_global["m_total_queue_drop"]),
                queue_full=int(raw_global["m_total_queue_full"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise GeneratorError(f"TRex's statistics cannot be read: {error!r}") from error


def measurement(
    before: StlReading | None,
    after: StlReading,
    paths: Sequence[tuple[int, int]],
    elapsed_s: float,
    uncertainty_s: float = 0.0,
    settled: bool = True,
) -> Measurement:
    """Return the measurement between two readings (``before`` None: all counters started at 0).

    ``paths`` are pairs of ports: the first sends, the second receives.
    """
    directions = tuple(
        Direction(_more(before, after, "opackets", sender), _more(before, after, "ipackets", receiver))
        for sender, receiver in paths
    )
    used = {port for path in paths for port in path}
    rx_errors = sum(_more(before, after, "ierrors", port) for port in used)
    tx_errors = sum(_more(before, after, "oerrors", port) for port in used)
    queue_drops = after.queue_drops - (before.queue_drops if before else 0)
    return Measurement(
        tx_packets=sum(d.tx_packets for d in directions),
        rx_packets=sum(d.rx_packets for d in directions),
        elapsed_s=elapsed_s,
        rx_errors=rx_errors,
        queue_drops=queue_drops + tx_errors,
        queue_full=after.queue_full - (before.queue_full if before else 0),
        elapsed_uncertainty_s=uncertainty_s,
        settled=settled,
        directions=directions,
        evidence={"generator.rx": rx_errors, "generator.queue": queue_drops},
    )


def _more(before: StlReading | None, after: StlReading, name: str, port: int) -> int:
    counts: Mapping[int, int] = getattr(after, name)
    if port not in counts:
        raise GeneratorError(f"TRex has no port {port}")
    return counts[port] - (getattr(before, name).get(port, 0) if before else 0)


# -- Parent side of the stateless TRex client: a child process that owns ports of a server. -------


#: Directory of the client package within a TRex installation.
PACKAGE: Final = Path("automation/trex_control_plane/interactive")
_CHILD: Final = Path(__file__).with_name("trex_stl_child.py")
#: Seconds for an answer; the client itself gives up on a server after a few seconds.
_ANSWER_S: Final = 30.0
#: Seconds to connect: importing scapy is slow, and the client retries an absent server.
_CONNECT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class StlServer:
    """Address of the server; ``force`` acquires ports that another session owns."""

    host: str = "127.0.0.1"
    sync_port: int = 4501
    async_port: int = 4500
    force: bool = False
    #: Configuration to start the server with, and stop it at the end; None: it is running.
    configuration: Path | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Connected(_Answer):
    version: str
    speeds_gbps: tuple[float, ...]
    drivers: tuple[str, ...]


class StlRead(_Answer):
    """Counters, and the monotonic times in seconds before and after reading them."""

    from_s: float
    to_s: float
    active: bool
    ports: dict[str, dict[str, Any]]
    raw_global: dict[str, Any]

    @property
    def counts(self) -> StlReading:
        return StlReading.parse(self.ports, self.raw_global)


class _Latency(_Answer):
    """Histogram (lower edge in microseconds, frames) and largest latency of one stream."""

    histogram: dict[str, int]
    max_us: float


class _Latencies(_Answer):
    streams: tuple[_Latency, ...]


class StlClient:
    """Owns the ports from construction until ``close``."""

    def __init__(self, server: StlServer, trex_dir: Path | None, ports: list[int]) -> None:
        """``trex_dir`` None: use the installed client package.

        Raises: UnusableInput, GeneratorError.
        """
        package = _package(trex_dir)
        with ExitStack() as opened:
            if server.configuration is not None:
                if trex_dir is None:
                    raise UnusableInput("--trex-cfg", "a server is started from --trex-dir: say it")
                started = TrexServer(trex_dir, server.configuration, server.sync_port)
                opened.callback(started.close)
            # -P: do not search the directory of the script for modules.
            self._child = Dialogue("TRex", [sys.executable, "-P", str(_CHILD)])
            opened.callback(self._child.close)
            about = self._child.ask(
                {
                    "op": "connect",
                    "package": package,
                    "server": server.host,
                    "sync_port": server.sync_port,
                    "async_port": server.async_port,
                    "ports": ports,
                    "force": server.force,
                },
                _CONNECT_S,
                _Connected,
            )
            self._opened = opened.pop_all()
        self.version = about.version
        self.drivers = sorted(set(about.drivers))
        if len(about.speeds_gbps) != len(ports):
            self.close()
            raise GeneratorError(f"TRex reports the speed of {len(about.speeds_gbps)} of {len(ports)} ports")
        self.speeds_gbps = dict(zip(ports, about.speeds_gbps, strict=True))

    def tell(self, what: str, **more: Any) -> None:
        """Send a command that has no result. Raises: GeneratorError."""
        self._child.ask({"op": what, **more}, _ANSWER_S, _Answer)

    def read(self) -> StlRead:
        """Read the counters of all ports. Raises: GeneratorError."""
        return self._child.ask({"op": "read"}, _ANSWER_S, StlRead)

    def latencies(self, ids: Sequence[int]) -> tuple[LatencySummary, ...]:
        """Read the latency streams with these ids; one without samples is left out.

        Raises: GeneratorError.
        """
        answer = self._child.ask({"op": "latency", "ids": list(ids)}, _ANSWER_S, _Latencies)
        found = (summary(stream.histogram, stream.max_us) for stream in answer.streams)
        return tuple(one for one in found if one is not None)

    def close(self) -> None:
        """Release the ports, and stop the server if it was started here. Idempotent."""
        self._opened.close()


def _package(trex_dir: Path | None) -> str | None:
    if trex_dir is None:
        return None
    package = (trex_dir / PACKAGE).resolve()
    if not (package / "trex").is_dir():
        raise UnusableInput("--trex-dir", f"{trex_dir} is no tree of TRex: it has no {PACKAGE}")
    return str(package)


# -- The generator ``trex-stl``: trials with the stateless TRex client. ---------------------------


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
        self,
        paths: Sequence[StlPath],
        server: StlServer,
        trex_dir: Path | None,
        profile: StlProfile | None = None,
        max_pps: float | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        """``trex_dir`` None: the installed client package. ``in_flight``: frames the device may hold.

        Raises: UnusableInput, GeneratorError.
        """
        if profile is not None and not profile.file.is_file():
            raise UnusableInput("--trex-profile", f"{profile.file}: no such file")
        self._paths = [
            replace(path, frames=path.frames.in_direction(number)) for number, path in enumerate(paths)
        ]
        self._pairs = [(path.send, path.receive) for path in paths]
        self._senders = [path.send for path in paths]
        self._profile = profile
        self._loaded: object = None
        #: Ids of the loaded latency streams, and the next one: TRex counts by id.
        self._latency_ids: list[int] = []
        self._next_id = 1
        self._in_flight = InFlight(in_flight)
        ports = sorted({port for pair in self._pairs for port in pair})
        self._client = StlClient(server, trex_dir, ports)
        speeds = self._client.speeds_gbps
        self._info = GeneratorInfo(
            f"TRex {self._client.version} stateless ({', '.join(self._client.drivers)})",
            max_pps or math.inf,
            line_bps=1e9 * sum(speeds[port] for port in self._senders) or math.inf,
            latency=profile is None,
            bursts=profile is None,
        )

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        self._load(request)
        before, _ = at_rest(self._counts, lambda _: True, 0.0)
        progress = ProgressWatch(request)
        looks, aborted = self._send(request, before, progress)
        after, settled = at_rest(self._counts, lambda now: _complete(self._between(before, now)))
        total = self._between(before, after).tx_packets
        elapsed_s, doubt_s = elapsed(looks, total)
        measured = self._between(before, after, elapsed_s, doubt_s, settled)
        if aborted and measured.tx_packets == measured.rx_packets:
            self._in_flight.was_more()
        latencies = self._client.latencies(self._latency_ids) if self._latency_ids else ()
        return replace(measured, aborted=aborted, latencies=latencies, progress=progress.readings)

    def close(self) -> None:
        self._client.close()

    def _load(self, request: TrialRequest) -> None:
        """Load the streams, unless they are loaded already."""
        desired_streams: object = self._profile or (request.frame_size, request.mix, request.flows)
        if request.burst > 1:
            # The streams have the rate and the number of frames.
            desired_streams = (desired_streams, request.burst, request.rate_pps, request.duration_s)
        if desired_streams == self._loaded and not request.latency and not self._latency_ids:
            return
        self._loaded = None
        self._latency_ids = []
        if self._profile is not None:
            self._client.tell(
                "profile",
                file=str(self._profile.file.resolve()),
                ports=self._senders,
                arguments=list(self._profile.arguments),
            )
        else:
            streams = list(_streams(self._paths, request))
            if request.burst > 1:
                streams = list(in_bursts(iter(streams), request, len(self._paths), self._client.speeds_gbps))
            if request.latency:
                measuring = list(latency_streams(streams, request, self._next_id))
                self._latency_ids = [stream["latency_id"] for stream in measuring]
                self._next_id += len(measuring)
                streams += measuring
            self._client.tell("load", streams=streams)
        self._loaded = desired_streams

    def _send(
        self, request: TrialRequest, before: StlReading, progress: ProgressWatch
    ) -> tuple[list[Look], bool]:
        """Run the traffic until all is sent, the trial is late, or loss is certain.

        Returns: the samples, and True if it was stopped because of certain loss.
        """
        watches = [LossWatch(self._in_flight.packets) for _ in self._pairs]
        looks: list[Look] = []
        self._client.tell(
            "start",
            ports=self._senders,
            duration_s=request.duration_s,
            # TRex does not accept an exponent.
            mult="1" if request.burst > 1 else f"{request.rate_pps / len(self._pairs):.4f}pps",
        )
        late = time.monotonic() + request.duration_s * (1 + _LATE_PART) + _LATE_S
        ahead_s = burst_s(request, len(self._pairs))
        while True:
            time.sleep(_LOOK_S)
            read = self._client.read()
            now = self._between(before, read.counts)
            at_s = (read.from_s + read.to_s) / 2
            looks.append(Look(at_s, (read.to_s - read.from_s) / 2 + ahead_s, now.tx_packets))
            progress.look(at_s, now.tx_packets, now.rx_packets)
            if not read.active:
                return looks, False
            lost = [
                watch.sees_loss(
                    at_s, d.tx_packets, d.rx_packets, request.rate_pps * (read.to_s - read.from_s)
                )
                for watch, d in zip(watches, now.directions, strict=True)
            ]
            is_late = time.monotonic() > late
            if is_late or (request.abort_on_loss and any(lost)):
                self._client.tell("stop")
                return looks, not is_late

    def _between(
        self,
        before: StlReading,
        after: StlReading,
        elapsed_s: float = 0.0,
        doubt_s: float = 0.0,
        settled: bool = True,
    ) -> Measurement:
        return measurement(before, after, self._pairs, elapsed_s, doubt_s, settled)

    def _counts(self) -> StlReading:
        return self._client.read().counts


def elapsed(looks: Sequence[Look], total: int) -> tuple[float, float]:
    """Return the seconds from the first frame to the last, and their uncertainty (pure).

    Extrapolates the rate between the first and the last sample with traffic to all frames.
    """
    moving = [look for look in looks if 0 < look.sent < total]
    if len(moving) < 2 or moving[0].sent == moving[-1].sent or moving[0].at_s >= moving[-1].at_s:
        # Too short for two samples: somewhere within the polled time.
        span = looks[-1].at_s - looks[0].at_s if looks else 0.0
        return span / 2, span / 2 + _LOOK_S
    first, last = moving[0], moving[-1]
    seconds = total * (last.at_s - first.at_s) / (last.sent - first.sent)
    stretch = seconds / (last.at_s - first.at_s)
    return seconds, (first.doubt_s + last.doubt_s) * stretch


def _complete(counted: Measurement) -> bool:
    return all(d.rx_packets >= d.tx_packets for d in counted.directions)


def _streams(paths: Sequence[StlPath], request: TrialRequest) -> Iterator[dict[str, Any]]:
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
                "port": path.send,
                "size": size,
                "pps": share,
                "flows": request.flows,
                "field": field,
                "field_bytes": field_bytes,
                "first": first,
                "source_mac": frames.source_mac,
                "destination_mac": frames.destination_mac,
                "source_ip": str(frames.source_ip),
                "destination_ip": str(frames.destination_ip),
                "source_port": frames.source_port,
                "destination_port": frames.destination_port,
            }
