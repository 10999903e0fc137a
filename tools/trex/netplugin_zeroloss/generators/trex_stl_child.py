"""Runs the stateless TRex client in a child process, controlled by JSON lines.

TRex's package puts its own scapy, zmq and yaml before the installed ones, so a program that uses any of
them must not import it. This file is run by path and imports nothing from netplugin. Each request names a
method of ``Child`` and has its arguments:

    -> {"op":"connect","package":DIRECTORY|null,"server":..,"sync_port":..,"async_port":..,
        "ports":[0,1],"force":false}
    <- {"version":"v3.08","speeds_gbps":[10.0,10.0],"drivers":["net_ice","net_ice"]}
    -> {"op":"load","streams":[{"port":0,"size":64,"packet":{..},"engine":[..],"mode":[..]},..]}   <- {}
    -> {"op":"profile","file":FILE,"arguments":[..],"ports":[0]}                       <- {}
    -> {"op":"start","ports":[0],"mult":"38000.00pps","duration_s":60.0}               <- {}
    -> {"op":"read"}            <- {"from_s":..,"to_s":..,"active":true,"ports":{..},"queue_drops":..,..}
    -> {"op":"stop"}                                                                   <- {}
    -> {"op":"latency","ids":[1,2]}
    <- {"streams":[{"histogram":{"20":991,"30":9},"max_us":37.0,"lost":0},..]}
    -> {"op":"bye"}

Times are of the monotonic clock. Errors are answered as ``{"error": TEXT}``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_COUNTERS = ("opackets", "ipackets", "ierrors", "oerrors")


def counters(stats: Mapping[Any, Any], raw_global: Mapping[str, Any], ports: Sequence[Any]) -> dict[str, Any]:
    """Return what counts of the results of ``get_stats()`` and of the RPC ``get_global_stats``."""
    return {
        "ports": {port: {name: stats[port][name] for name in _COUNTERS} for port in ports},
        "queue_drops": raw_global["m_total_queue_drop"],
        "queue_full": raw_global["m_total_queue_full"],
    }


class Child:
    """The connected client and its ports."""

    api: Any
    client: Any
    ports: list[int]

    def connect(
        self, package: str | None, server: str, sync_port: int, async_port: int, ports: list[int], force: bool
    ) -> dict[str, Any]:
        if package:
            sys.path.insert(0, package)
        try:
            self.api = importlib.import_module("trex.stl.api")
        except ImportError as error:
            raise RuntimeError(f"the client of TRex cannot be imported: {error}") from error
        client = self.client = self.api.STLClient(
            server=server, sync_port=sync_port, async_port=async_port, verbose_level="none"
        )
        with _hint("does t-rex-64 -i run there? --trex-cfg starts one here"):
            client.connect()
        known = client.get_all_ports()
        missing = [port for port in ports if port not in known]
        if missing:
            raise RuntimeError(f"it has no port {missing[0]}, only {', '.join(map(str, known))}")
        # Not reset(): it acquires ports by force.
        with _hint("wait until it ends, or take the ports with --trex-force"):
            client.acquire(ports=ports, force=force)
        self.ports = ports
        self.stop()
        client.remove_all_streams(ports=ports)
        about = client.get_port_info(ports)
        promiscuous = [p["index"] for p in about if p["is_prom_supported"] in (True, "yes")]
        if promiscuous:
            client.set_port_attr(ports=promiscuous, promiscuous=True)
        return {
            "version": client.get_server_version()["version"],
            "speeds_gbps": [port["speed"] for port in about],
            "drivers": [port["driver"] for port in about],
        }

    def load(self, streams: list[dict[str, Any]]) -> None:
        self.client.remove_all_streams(ports=self.ports)
        for stream in streams:
            self.client.add_streams(self._stream(**stream), ports=[stream["port"]])

    def profile(self, file: str, arguments: list[str], ports: list[int]) -> None:
        self.client.remove_all_streams(ports=self.ports)
        for number, port in enumerate(ports):
            profile = self.api.STLProfile.load_py(
                file, direction=number % 2, port_id=port, tunables=arguments
            )
            self.client.add_streams(profile.get_streams(), ports=[port])

    def start(self, ports: list[int], mult: str, duration_s: float) -> None:
        # Force: TRex's line rate of a virtual port is not real.
        self.client.start(ports=ports, mult=mult, duration=duration_s, force=True)

    def read(self) -> dict[str, Any]:
        from_s = time.monotonic()
        active = bool(self.client.is_traffic_active(ports=self.ports))
        stats = self.client.get_stats(ports=self.ports)
        to_s = time.monotonic()
        answer = self.client.conn.rpc.transmit("get_global_stats")
        if not answer:
            raise RuntimeError(f"get_global_stats: {answer}")
        read = counters(stats, answer.data(), self.ports)
        return {"from_s": from_s, "to_s": to_s, "active": active, **read}

    def latency(self, ids: list[int]) -> dict[str, Any]:
        """Read the latency streams with these packet group ids; what the client has not is left out.

        A stream of which nothing comes back has no histogram, and its other values are no numbers.
        """
        found = self.client.get_pgid_stats(ids).get("latency") or {}
        streams = []
        for number in ids:
            one = found.get(number) or {}
            measured, errors = one.get("latency") or {}, one.get("err_cntrs") or {}
            histogram = measured.get("histogram") or {}
            longest = float(measured["total_max"]) if histogram else 0.0
            streams.append({"histogram": histogram, "max_us": longest, "lost": errors.get("dropped", 0)})
        return {"streams": streams}

    def stop(self) -> None:
        self.client.stop(ports=self.ports, rx_delay_ms=0)

    def bye(self) -> None:
        if hasattr(self, "client"):
            if hasattr(self, "ports"):
                self.stop()
                self.client.remove_all_streams(ports=self.ports)
            self.client.disconnect()

    def _stream(
        self,
        port: int,
        size: int,
        packet: dict[str, dict[str, Any]],
        engine: list[tuple[str, dict[str, Any]]],
        mode: tuple[str, dict[str, Any]],
        latency_id: int | None = None,
        isg: float = 0.0,
    ) -> Any:
        """Build a stream of UDP over IPv4; ``size`` is with the FCS, which the NIC adds."""
        api = self.api
        ether, ip, udp = (getattr(api, layer)(**packet[layer]) for layer in ("Ether", "IP", "UDP"))
        headers = ether / ip / udp
        frame = headers / (b"\0" * (size - 4 - len(headers)))
        more = {} if latency_id is None else {"flow_stats": api.STLFlowLatencyStats(pg_id=latency_id)}
        return api.STLStream(
            packet=api.STLPktBuilder(pkt=frame, vm=[getattr(api, name)(**values) for name, values in engine]),
            mode=getattr(api, mode[0])(**mode[1]),
            isg=isg,
            **more,
        )


@contextmanager
def _hint(text: str) -> Iterator[None]:
    """Add a hint to TRex's errors."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{error}: {text}") from error


def main() -> None:
    # TRex prints to standard output: redirect it to standard error, and keep the original for
    # answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child()
    try:
        for line in sys.stdin:
            ask = json.loads(line)
            op = ask.pop("op")
            if op == "bye":
                break
            try:
                answer = getattr(child, op)(**ask) or {}
            except Exception as error:
                # TRex's errors contain ANSI colours and several lines.
                words = repr(error) if isinstance(error, LookupError) else f"{error}" or repr(error)
                text = re.sub(r"\x1b\[[0-9;]*m", "", words)
                answer = {"error": " ".join(text.replace("*", "").split())}
            answers.write(json.dumps(answer) + "\n")
    finally:
        child.bye()


if __name__ == "__main__":
    main()
