"""The generator ``trex-stl``: trials with the stateless TRex client in a child process.

Observed with TRex 3.08:

- ``duration`` fixes the number of frames, not the duration: 5 s at 8 Mpps took 14.7 s.
- ``ierrors`` of the receiving port are frames that the generator itself lost.
- A full transmit queue drops (``low_end``) or retries. Only the global statistics show it:
  ``m_total_queue_drop``, ``m_total_queue_full``. They are never cleared: take the difference.
- ``tx_pps`` and similar values are slow averages. Rates are computed from counters and elapsed time.
- Loss is computed from port counters. Per-stream counters are read on another core and are late.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from netplugin_zeroloss.generators import trex_streams
from netplugin_zeroloss.generators.contract import (
    IN_FLIGHT,
    Count,
    Generator,
    GeneratorDescription,
    GeneratorInfo,
    Positive,
    TrialWatch,
    all_came,
    at_rest,
    counted,
    each_once,
)
from netplugin_zeroloss.generators.dialogue import Answer, Dialogue
from netplugin_zeroloss.generators.frames import Frames
from netplugin_zeroloss.generators.trex_program import serving
from netplugin_zeroloss.values import Direction, GeneratorError, Measurement, TrialRequest, UnusableInput

#: Directory of the client package within a TRex installation.
_PACKAGE: Final = Path("automation/trex_control_plane/interactive")
_CHILD: Final = Path(__file__).with_name("trex_stl_child.py")
#: Seconds for an answer; the client itself gives up on a server after a few seconds.
_ANSWER_S: Final = 30.0
#: Seconds to connect: importing scapy is slow, and the client retries an absent server.
_CONNECT_S: Final = 60.0
#: Polling interval of the counters while sending, in seconds.
_LOOK_S: Final = 0.02
#: See ``TrialWatch``.
_LATE_S: Final = 1.0

TcpPort = Annotated[int, Field(ge=1, le=65535)]


class TrexPath(GeneratorDescription):
    """TRex port numbers: frames leave one port and return at the other."""

    send: Count
    receive: Count
    frames: Frames = Frames()


class TrexStl(GeneratorDescription):
    """The stateless client of TRex with a running server, or one started from ``trex_dir``."""

    type: Literal["trex-stl"] = "trex-stl"
    #: TRex installation directory with the client package; None: the installed Python package.
    trex_dir: Path | None = None
    #: Start a server from ``trex_dir`` with this configuration and stop it at the end; None: one is
    #: running.
    trex_cfg: Path | None = None
    server: str = "127.0.0.1"
    sync_port: TcpPort = 4501
    async_port: TcpPort = 4500
    paths: Annotated[tuple[TrexPath, ...], Field(min_length=1), AfterValidator(each_once)] = (
        TrexPath(send=0, receive=1),
    )
    #: Profile (a Python file with ``register``) that replaces the built-in frames.
    profile: Path | None = None
    profile_arguments: tuple[str, ...] = ()
    #: Acquire ports that another session owns.
    force: bool = False
    #: Frames that the device can hold: a trial may stop early when more are missing.
    in_flight: Count = IN_FLIGHT
    #: Upper limit of the load in pps, all paths together; None: from the port speed.
    max_pps: Positive | None = None


class _Connected(Answer):
    version: str
    speeds_gbps: tuple[float, ...]
    drivers: tuple[str, ...]


class PortCounters(Answer):
    """Counters of a port, as TRex names them."""

    opackets: int
    ipackets: int
    ierrors: int
    oerrors: int


class StlReading(Answer):
    """Counters of all ports, and global ones, at one moment."""

    ports: dict[int, PortCounters]
    queue_drops: int
    queue_full: int

    def directions(self, before: StlReading, paths: Sequence[TrexPath]) -> list[Direction]:
        """Return the frames of each path since an earlier reading."""
        return [
            Direction(
                self.ports[path.send].opackets - before.ports[path.send].opackets,
                self.ports[path.receive].ipackets - before.ports[path.receive].ipackets,
            )
            for path in paths
        ]


class _Running(StlReading):
    """Counters of a trial, and the monotonic times in seconds before and after reading those of the ports."""

    from_s: float
    to_s: float
    active: bool


class _Latency(Answer):
    """Histogram (lower edge in microseconds, frames), largest latency and lost frames of one stream."""

    histogram: dict[str, int]
    max_us: float
    lost: int


class _Latencies(Answer):
    streams: tuple[_Latency, ...]


def measurement(
    before: StlReading, after: StlReading, paths: Sequence[TrexPath], elapsed_s: float, **more: Any
) -> Measurement:
    """Return the measurement between two readings."""
    used = {port for path in paths for port in (path.send, path.receive)}
    rx_errors = sum(after.ports[port].ierrors - before.ports[port].ierrors for port in used)
    tx_errors = sum(after.ports[port].oerrors - before.ports[port].oerrors for port in used)
    queue_drops = after.queue_drops - before.queue_drops
    return counted(
        after.directions(before, paths),
        elapsed_s,
        rx_errors=rx_errors,
        queue_drops=queue_drops + tx_errors,
        queue_full=after.queue_full - before.queue_full,
        evidence={"generator.rx": rx_errors, "generator.queue": queue_drops},
        **more,
    )


@dataclass(frozen=True, slots=True)
class Look:
    """Frames sent at ``at_s``, accurate to ``doubt_s`` seconds."""

    at_s: float
    doubt_s: float
    sent: int


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


class TrexStlGenerator(Generator):
    """Owns the ports of its paths from construction until ``close``."""

    def __init__(self, description: TrexStl) -> None:
        """Raises: UnusableInput, GeneratorError."""
        profile = description.profile
        if profile is not None and not profile.is_file():
            raise UnusableInput("--trex-profile", f"{profile}: no such file")
        self._description = description
        self._paths = description.paths
        self._senders = [path.send for path in self._paths]
        self._in_flight = description.in_flight
        self._loaded: object = None
        #: Ids of the loaded latency streams, and the next one: TRex counts by id.
        self._latency_ids: list[int] = []
        self._next_id = 1
        ports = sorted({port for path in self._paths for port in (path.send, path.receive)})
        with ExitStack() as opened:
            about = self._connect(opened, ports)
            if len(about.speeds_gbps) != len(ports):
                why = f"the speed of {len(about.speeds_gbps)} of {len(ports)} ports"
                raise GeneratorError(f"TRex reports {why}")
            self._opened = opened.pop_all()
        self._speeds_gbps = dict(zip(ports, about.speeds_gbps, strict=True))
        self._info = GeneratorInfo(
            f"TRex {about.version} stateless ({', '.join(sorted(set(about.drivers)))})",
            description.max_pps or math.inf,
            line_bps=1e9 * sum(self._speeds_gbps[port] for port in self._senders) or math.inf,
            latency=profile is None,
            bursts=profile is None,
        )

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        self._load(request)
        before, _ = at_rest(self._read, lambda _: True, 0.0)
        watch = TrialWatch(request, len(self._paths), self._in_flight, _LATE_S)
        looks = self._send(request, before, watch)
        after, settled = at_rest(self._read, lambda now: all_came(now.directions(before, self._paths)))
        total = sum(d.tx_packets for d in after.directions(before, self._paths))
        elapsed_s, doubt_s = elapsed(looks, total)
        more: dict[str, Any] = {"elapsed_uncertainty_s": doubt_s, "settled": settled}
        if self._latency_ids:
            more |= self._latencies()
        measured = watch.finish(measurement(before, after, self._paths, elapsed_s, **more))
        self._in_flight = watch.in_flight
        return measured

    def close(self) -> None:
        """Release the ports, and stop the server if it was started here. Idempotent."""
        self._opened.close()

    def _connect(self, opened: ExitStack, ports: list[int]) -> _Connected:
        chosen, package = self._description, None
        if chosen.trex_dir is not None:
            package = (chosen.trex_dir / _PACKAGE).resolve()
            if not (package / "trex").is_dir():
                raise UnusableInput(
                    "--trex-dir", f"{chosen.trex_dir} is no tree of TRex: it has no {_PACKAGE}"
                )
        if chosen.trex_cfg is not None:
            if chosen.trex_dir is None:
                raise UnusableInput("--trex-cfg", "a server is started from --trex-dir: say it")
            opened.enter_context(closing(serving(chosen.trex_dir, chosen.trex_cfg, chosen.sync_port)))
        # -P: do not search the directory of the script for modules.
        self._child = opened.enter_context(closing(Dialogue("TRex", [sys.executable, "-P", str(_CHILD)])))
        where = chosen.model_dump(include={"server", "sync_port", "async_port", "force"})
        connect = {"op": "connect", "package": package and str(package), "ports": ports, **where}
        return self._child.ask(connect, _CONNECT_S, _Connected)

    def _tell(self, what: str, **more: Any) -> None:
        """Send a command that has no result. Raises: GeneratorError."""
        self._child.ask({"op": what, **more}, _ANSWER_S, Answer)

    def _read(self) -> StlReading:
        """Read the counters of all ports. Raises: GeneratorError."""
        return self._child.ask({"op": "read"}, _ANSWER_S, StlReading)

    def _latencies(self) -> dict[str, Any]:
        """Read the loaded latency streams; one without samples is left out. Raises: GeneratorError."""
        ask = {"op": "latency", "ids": self._latency_ids}
        streams = self._child.ask(ask, _ANSWER_S, _Latencies).streams
        found = (trex_streams.summary(one.histogram, one.max_us) for one in streams)
        return {
            "latencies": tuple(one for one in found if one is not None),
            "readings": {"generator.latency_lost": sum(one.lost for one in streams)},
        }

    def _load(self, request: TrialRequest) -> None:
        """Load the streams, unless they are loaded already."""
        chosen = self._description
        desired: object = chosen.profile or (request.frame_size, request.mix, request.flows)
        if request.burst > 1:
            # The streams have the rate and the number of frames.
            desired = (desired, request.burst, request.rate_pps, request.duration_s)
        if desired == self._loaded and not request.latency and not self._latency_ids:
            return
        self._loaded = None
        self._latency_ids = []
        if chosen.profile is not None:
            file, arguments = str(chosen.profile.resolve()), list(chosen.profile_arguments)
            self._tell("profile", file=file, ports=self._senders, arguments=arguments)
        else:
            ways = [(path.send, path.frames.in_direction(n)) for n, path in enumerate(self._paths)]
            streams = list(trex_streams.plain(ways, request))
            if request.burst > 1:
                streams = list(trex_streams.in_bursts(streams, request, len(ways), self._speeds_gbps))
            if request.latency:
                measuring = list(trex_streams.with_latency(streams, request, self._next_id))
                self._latency_ids = [stream["latency_id"] for stream in measuring]
                self._next_id += len(measuring)
                streams += measuring
            self._tell("load", streams=streams)
        self._loaded = desired

    def _send(self, request: TrialRequest, before: StlReading, watch: TrialWatch) -> list[Look]:
        """Run the traffic until all is sent, the trial is late, or loss is certain; returns the samples."""
        looks: list[Look] = []
        # TRex does not accept an exponent.
        mult = "1" if request.burst > 1 else f"{request.rate_pps / len(self._paths):.4f}pps"
        self._tell("start", ports=self._senders, duration_s=request.duration_s, mult=mult)
        watch.begin()
        ahead_s = trex_streams.burst_s(request, len(self._paths))
        while True:
            time.sleep(_LOOK_S)
            read = self._child.ask({"op": "read"}, _ANSWER_S, _Running)
            now = read.directions(before, self._paths)
            at_s, took_s = (read.from_s + read.to_s) / 2, read.to_s - read.from_s
            looks.append(Look(at_s, took_s / 2 + ahead_s, sum(d.tx_packets for d in now)))
            if not read.active:
                return looks
            if watch.stops(at_s, now, request.rate_pps * took_s):
                self._tell("stop")
                return looks
