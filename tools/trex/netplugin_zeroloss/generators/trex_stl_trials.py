"""A program that runs trials with the stateless TRex client, by the protocol of ``exec``.

Observed with TRex 3.08, next to what docs/zeroloss/generators.md says of its results:

- A full transmit queue drops (``low_end``) or retries. Only the global statistics show it.
- ``tx_pps`` and similar values are slow averages. Rates are computed from counters and elapsed time.
- Loss is computed from port counters. Per-stream counters are read on another core and are late.
- A latency stream of which no frame comes back has no histogram, and its other values are no numbers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from netplugin_zeroloss.generators import contract, trex_streams
from netplugin_zeroloss.generators.trex_stl import PACKAGE, TrexPath, TrexStl
from netplugin_zeroloss.values import Direction, Measurement, TrialRequest

#: Polling interval of the counters while sending, in seconds.
_LOOK_S: Final = 0.02
#: See ``TrialWatch``.
_LATE_S: Final = 1.0


class Counters(dict[tuple[int | None, str], int]):
    """Counters by port and name, and those of all ports together (None), at one moment."""

    @classmethod
    def parse(cls, stats: Mapping[Any, Any], raw_global: Mapping[str, Any], ports: Sequence[int]) -> Counters:
        """Take what counts of the results of ``get_stats()`` and of the RPC ``get_global_stats``."""
        names = ("opackets", "ipackets", "ierrors", "oerrors")
        found = cls({(port, name): int(stats[port][name]) for port in ports for name in names})
        for name in ("queue_drop", "queue_full"):
            found[None, name] = int(raw_global[f"m_total_{name}"])
        return found

    def since(self, before: Counters) -> Counters:
        """Return what was counted since an earlier reading; negative where a counter wrapped."""
        return Counters({key: count - before[key] for key, count in self.items()})

    def directions(self, paths: Sequence[TrexPath]) -> list[Direction]:
        """Return the frames of each path."""
        return [Direction(self[path.send, "opackets"], self[path.receive, "ipackets"]) for path in paths]

    def measurement(self, paths: Sequence[TrexPath], elapsed_s: float, **more: Any) -> Measurement:
        """Return the measurement of a trial in which this was counted."""
        sums: Counter[str] = Counter()
        for (_, name), count in self.items():
            sums[name] += count
        more["queue_full"], drops = sums["queue_full"], sums["queue_drop"] + sums["oerrors"]
        return contract.counted(self.directions(paths), elapsed_s, sums["ierrors"], drops, **more)


# -- Trials. --------------------------------------------------------------------------------------


class Trials(contract.Generator):
    """The connected client; owns the ports of its paths from construction until ``close``."""

    def __init__(self, description: TrexStl) -> None:
        self._description = description
        self._paths = description.paths
        self._senders = [path.send for path in self._paths]
        self._ports = sorted({port for path in self._paths for port in (path.send, path.receive)})
        self._in_flight = description.in_flight
        self._loaded: object = None
        #: Ids of the loaded latency streams, and the next one: TRex counts by id.
        self._latency_ids: list[int] = []
        self._next_id = 1
        if description.trex_dir is not None:
            sys.path.insert(0, str((description.trex_dir / PACKAGE).resolve()))
        try:
            self._api: Any = importlib.import_module("trex.stl.api")
        except ImportError as error:
            raise RuntimeError(f"the client of TRex cannot be imported: {error}") from error
        ports = {"sync_port": description.sync_port, "async_port": description.async_port}
        self._client: Any = self._api.STLClient(server=description.server, **ports, verbose_level="none")
        with ExitStack() as opened:
            self._info = self._connected(opened)
            self._opened = opened.pop_all()

    def _connected(self, opened: ExitStack) -> contract.GeneratorInfo:
        client, ports, chosen = self._client, self._ports, self._description
        opened.callback(client.disconnect)
        with _hint("does t-rex-64 -i run there? --trex-cfg starts one here"):
            client.connect()
        known = client.get_all_ports()
        missing = [port for port in ports if port not in known]
        if missing:
            raise RuntimeError(f"it has no port {missing[0]}, only {', '.join(map(str, known))}")
        # Not reset(): it acquires ports by force.
        with _hint("wait until it ends, or take the ports with --trex-force"):
            client.acquire(ports=ports, force=chosen.force)
        opened.callback(self._clear)
        self._clear()
        about = client.get_port_info(ports)
        promiscuous = [p["index"] for p in about if p["is_prom_supported"] in (True, "yes")]
        if promiscuous:
            client.set_port_attr(ports=promiscuous, promiscuous=True)
        drivers = ", ".join(sorted({port["driver"] for port in about}))
        self._speeds_gbps = {number: port["speed"] for number, port in zip(ports, about, strict=True)}
        return contract.GeneratorInfo(
            f"TRex {client.get_server_version()['version']} stateless ({drivers})",
            chosen.max_pps or math.inf,
            line_bps=1e9 * sum(self._speeds_gbps[port] for port in self._senders) or math.inf,
            latency=chosen.profile is None,
            bursts=chosen.profile is None,
        )

    def run(self, request: TrialRequest) -> Measurement:
        self._load(request)
        paths = self._paths
        before, _ = contract.at_rest(self._read, lambda _: True, 0.0)
        watch = contract.TrialWatch(request, len(paths), self._in_flight, _LATE_S)
        looks = self._send(request, before, watch)
        found, settled = contract.at_rest(
            lambda: self._read().since(before), lambda found: contract.all_came(found.directions(paths))
        )
        elapsed_s, doubt_s = contract.elapsed(looks, Direction.total(found.directions(paths)).tx_packets)
        more = {"elapsed_uncertainty_s": doubt_s, "settled": settled, **self._latencies()}
        measured = watch.finish(found.measurement(paths, elapsed_s, **more))
        self._in_flight = watch.in_flight
        return measured

    def _clear(self) -> None:
        """Stop what is sent, and forget the streams."""
        self._client.stop(ports=self._ports, rx_delay_ms=0)
        self._client.remove_all_streams(ports=self._ports)

    def _read(self, stats: Mapping[Any, Any] | None = None) -> Counters:
        """Read the counters; ``stats``: those of the ports, if they have been read."""
        stats = stats or self._client.get_stats(ports=self._ports)
        answer = self._client.conn.rpc.transmit("get_global_stats")
        if not answer:
            raise RuntimeError(f"get_global_stats: {answer}")
        return Counters.parse(stats, answer.data(), self._ports)

    def _latencies(self) -> dict[str, Any]:
        """Read the loaded latency streams; one without samples is left out, and costs no trial."""
        if not self._latency_ids:
            return {}
        summaries, lost, stats = [], 0, {}
        with suppress(Exception):
            stats = self._client.get_pgid_stats(self._latency_ids)["latency"]
        for number in self._latency_ids:
            with suppress(Exception):
                lost += stats[number]["err_cntrs"]["dropped"]
                found = stats[number]["latency"]
                summaries.append(trex_streams.summary(found["histogram"], found["total_max"]))
        latencies = tuple(one for one in summaries if one is not None)
        return {"latencies": latencies, "readings": {"generator.latency_lost": lost}}

    def _load(self, request: TrialRequest) -> None:
        """Load the streams, unless they are loaded already."""
        chosen = self._description
        desired: object = chosen.profile or (request.frame_size, request.mix, request.flows)
        if request.burst > 1:
            # The streams have the rate and the number of frames.
            desired = (desired, request.burst, request.rate_pps, request.duration_s)
        if desired == self._loaded and not request.latency and not self._latency_ids:
            return
        self._loaded, self._latency_ids = None, []
        self._client.remove_all_streams(ports=self._ports)
        if chosen.profile is not None:
            for number, port in enumerate(self._senders):
                how = {"direction": number % 2, "port_id": port, "tunables": list(chosen.profile_arguments)}
                profile = self._api.STLProfile.load_py(str(chosen.profile.resolve()), **how)
                self._client.add_streams(profile.get_streams(), ports=[port])
        else:
            for stream in self._streams(request):
                self._client.add_streams(self._stream(**stream), ports=[stream["port"]])
        self._loaded = desired

    def _streams(self, request: TrialRequest) -> list[trex_streams.Stream]:
        ways = [(path.send, path.frames.in_direction(n)) for n, path in enumerate(self._paths)]
        streams = list(trex_streams.plain(ways, request))
        if request.burst > 1:
            streams = list(trex_streams.in_bursts(streams, request, len(ways), self._speeds_gbps))
        if request.latency:
            measuring = list(trex_streams.with_latency(streams, request, self._next_id))
            self._latency_ids = [stream["latency_id"] for stream in measuring]
            self._next_id += len(measuring)
            streams += measuring
        return streams

    def _stream(
        self,
        port: int,
        size: int,
        packet: Mapping[str, Mapping[str, Any]],
        engine: Sequence[tuple[str, Mapping[str, Any]]],
        mode: tuple[str, Mapping[str, Any]],
        latency_id: int | None = None,
        isg: float = 0.0,
    ) -> Any:
        """Build a stream of UDP over IPv4; ``size`` is with the FCS, which the NIC adds."""
        api = self._api
        ether, ip, udp = (getattr(api, layer)(**packet[layer]) for layer in ("Ether", "IP", "UDP"))
        headers = ether / ip / udp
        frame = headers / (b"\0" * (size - 4 - len(headers)))
        builder = api.STLPktBuilder(pkt=frame, vm=[getattr(api, name)(**values) for name, values in engine])
        more = {} if latency_id is None else {"flow_stats": api.STLFlowLatencyStats(pg_id=latency_id)}
        return api.STLStream(packet=builder, mode=getattr(api, mode[0])(**mode[1]), isg=isg, **more)

    def _send(
        self, request: TrialRequest, before: Counters, watch: contract.TrialWatch
    ) -> list[contract.Look]:
        """Run the traffic until all is sent, the trial is late, or loss is certain; returns the samples."""
        looks: list[contract.Look] = []
        # TRex does not accept an exponent. Force: its line rate of a virtual port is not real.
        mult = "1" if request.burst > 1 else f"{request.rate_pps / len(self._paths):.4f}pps"
        self._client.start(ports=self._senders, mult=mult, duration=request.duration_s, force=True)
        watch.begin()
        ahead_s = trex_streams.burst_s(request, len(self._paths))
        while True:
            # Nothing is asked during a trial: the tool has ended.
            if select.select([sys.stdin], [], [], _LOOK_S)[0]:
                raise EOFError
            from_s = time.monotonic()
            active = bool(self._client.is_traffic_active(ports=self._ports))
            stats = self._client.get_stats(ports=self._ports)
            took_s = time.monotonic() - from_s
            now = self._read(stats).since(before).directions(self._paths)
            at_s = from_s + took_s / 2
            looks.append(contract.Look(at_s, took_s / 2 + ahead_s, Direction.total(now).tx_packets))
            if not active:
                return looks
            if watch.stops(at_s, now, request.rate_pps * took_s):
                self._client.stop(ports=self._ports, rx_delay_ms=0)
                return looks


@contextmanager
def _hint(text: str) -> Iterator[None]:
    """Add a hint to TRex's errors."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{error}: {text}") from error


# -- The protocol of ``exec``. --------------------------------------------------------------------


def _in_words(error: Exception) -> str:
    """Return an error in one line. TRex's have ANSI colours and several lines."""
    words = repr(error) if isinstance(error, LookupError) else f"{error}" or repr(error)
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", words).replace("*", "").split())


def main() -> None:
    # TRex prints to standard output: redirect it to standard error, and keep the original for
    # answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    sys.stdin.readline()
    try:
        trials = Trials(TrexStl.model_validate_json(sys.argv[1]))
    except Exception as error:
        say({"error": _in_words(error)})
        return
    with trials:
        about = asdict(trials.info)
        say({"ok": True} | {name: value for name, value in about.items() if value != math.inf})
        while (line := sys.stdin.readline()) and (ask := json.loads(line)).pop("op") == "trial":
            try:
                say(asdict(trials.run(TrialRequest(**ask))))
            except EOFError:
                return
            except Exception as error:
                say({"error": _in_words(error)})


if __name__ == "__main__":
    main()
