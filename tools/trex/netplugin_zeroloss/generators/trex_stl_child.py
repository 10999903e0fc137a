"""Runs the stateless TRex client in a child process, controlled by JSON lines.

TRex's package puts its own scapy, zmq and yaml before the installed ones, so a program that uses any of
them must not import it. This file is run by path and imports nothing from netplugin.

    -> {"op":"connect","package":DIRECTORY|null,"server":..,"sync_port":..,"async_port":..,
        "ports":[0,1],"force":false}
    <- {"version":"v3.08","speeds_gbps":[10.0,10.0],"drivers":["net_ice","net_ice"]}
    -> {"op":"load","streams":[{"port":0,"size":64,"pps":28,..},..]}
    -> {"op":"profile","file":FILE,"arguments":[..],"ports":[0]}                       <- {}
    -> {"op":"start","ports":[0],"mult":"38000.00pps","duration_s":60.0}               <- {}
    -> {"op":"read"}                  <- {"from_s":..,"to_s":..,"active":true,"ports":{..},"raw_global":{..}}
    -> {"op":"stop"}                                                                   <- {}
    -> {"op":"latency","ids":[1,2]}      <- {"streams":[{"histogram":{"20":991,"30":9},"max_us":37.0},..]}
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
from typing import Any

_COUNTERS = ("opackets", "ipackets", "ierrors", "oerrors")
_TOTALS = ("m_total_queue_drop", "m_total_queue_full")


class Child:
    """The connected client and its ports."""

    api: Any
    client: Any
    ports: list[int]

    def connect(self, ask: dict[str, Any]) -> dict[str, Any]:
        if ask["package"]:
            sys.path.insert(0, ask["package"])
        try:
            self.api = importlib.import_module("trex.stl.api")
        except ImportError as error:
            raise RuntimeError(f"the client of TRex cannot be imported: {error}") from error
        self.client = self.api.STLClient(
            server=ask["server"],
            sync_port=ask["sync_port"],
            async_port=ask["async_port"],
            verbose_level="none",
        )
        try:
            self.client.connect()
        except Exception as error:
            hint = "does t-rex-64 -i run there? --trex-cfg starts one here"
            raise RuntimeError(f"{error}: {hint}") from error
        known = self.client.get_all_ports()
        missing = [port for port in ask["ports"] if port not in known]
        if missing:
            raise RuntimeError(f"it has no port {missing[0]}, only {', '.join(map(str, known))}")
        # Not reset(): it acquires ports by force.
        try:
            self.client.acquire(ports=ask["ports"], force=ask["force"])
        except Exception as error:
            hint = "wait until it ends, or take the ports with --trex-force"
            raise RuntimeError(f"{error}: {hint}") from error
        self.ports = ask["ports"]
        self.client.stop(ports=self.ports, rx_delay_ms=0)
        self.client.remove_all_streams(ports=self.ports)
        about = self.client.get_port_info(self.ports)
        promiscuous = [p["index"] for p in about if p["is_prom_supported"] in (True, "yes")]
        if promiscuous:
            self.client.set_port_attr(ports=promiscuous, promiscuous=True)
        return {
            "version": self.client.get_server_version()["version"],
            "speeds_gbps": [port["speed"] for port in about],
            "drivers": [port["driver"] for port in about],
        }

    def load(self, ask: dict[str, Any]) -> dict[str, Any]:
        self.client.remove_all_streams(ports=self.ports)
        for stream in ask["streams"]:
            self.client.add_streams(self._stream(stream), ports=[stream["port"]])
        return {}

    def profile(self, ask: dict[str, Any]) -> dict[str, Any]:
        self.client.remove_all_streams(ports=self.ports)
        for number, port in enumerate(ask["ports"]):
            profile = self.api.STLProfile.load_py(
                ask["file"], direction=number % 2, port_id=port, tunables=ask["arguments"]
            )
            self.client.add_streams(profile.get_streams(), ports=[port])
        return {}

    def start(self, ask: dict[str, Any]) -> dict[str, Any]:
        # Force: TRex's line rate of a virtual port is not real.
        self.client.start(ports=ask["ports"], mult=ask["mult"], duration=ask["duration_s"], force=True)
        return {}

    def read(self, _ask: dict[str, Any]) -> dict[str, Any]:
        from_s = time.monotonic()
        active = bool(self.client.is_traffic_active(ports=self.ports))
        stats = self.client.get_stats(ports=self.ports)
        to_s = time.monotonic()
        answer = self.client.conn.rpc.transmit("get_global_stats")
        if not answer:
            raise RuntimeError(f"get_global_stats: {answer}")
        raw = answer.data()
        return {
            "from_s": from_s,
            "to_s": to_s,
            "active": active,
            "ports": {port: {name: stats[port][name] for name in _COUNTERS} for port in self.ports},
            "raw_global": {name: raw[name] for name in _TOTALS},
        }

    def latency(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Read the latency streams with these packet group ids."""
        found = self.client.get_pgid_stats(ask["ids"])["latency"]
        streams = [found[number]["latency"] for number in ask["ids"]]
        return {
            "streams": [
                {"histogram": stream["histogram"], "max_us": float(stream["total_max"])} for stream in streams
            ]
        }

    def stop(self, _ask: dict[str, Any]) -> dict[str, Any]:
        self.client.stop(ports=self.ports, rx_delay_ms=0)
        return {}

    def bye(self) -> None:
        if hasattr(self, "client"):
            if hasattr(self, "ports"):
                self.client.stop(ports=self.ports, rx_delay_ms=0)
                self.client.remove_all_streams(ports=self.ports)
            self.client.disconnect()

    def _stream(self, settings: dict[str, Any]) -> Any:
        """Build a stream: UDP over IPv4 with a field engine that counts through the flows."""
        api = self.api
        macs = {"src": settings["source_mac"], "dst": settings["destination_mac"]}
        # TRex fills in the port's MAC addresses where none is given.
        packet = (
            api.Ether(**{name: mac for name, mac in macs.items() if mac})
            / api.IP(src=settings["source_ip"], dst=settings["destination_ip"])
            / api.UDP(sport=settings["source_port"], dport=settings["destination_port"], chksum=0)
        )
        # Without FCS, which the NIC adds.
        packet = packet / (b"\0" * (settings["size"] - 4 - len(packet)))
        engine = []
        if settings["flows"] > 1:
            engine = [
                api.STLVmFlowVar(
                    "flow",
                    min_value=settings["first"],
                    max_value=settings["first"] + settings["flows"] - 1,
                    size=settings["field_bytes"],
                    op="inc",
                ),
                api.STLVmWrFlowVar("flow", pkt_offset=settings["field"]),
                api.STLVmFixIpv4(offset="IP"),
            ]
        more = {}
        if "latency_id" in settings:
            more["flow_stats"] = api.STLFlowLatencyStats(pg_id=settings["latency_id"])
        if "after_us" in settings:
            more["isg"] = settings["after_us"]
        return api.STLStream(
            packet=api.STLPktBuilder(pkt=packet, vm=engine),
            mode=self._mode(settings),
            **more,
        )

    def _mode(self, settings: dict[str, Any]) -> Any:
        burst = settings.get("burst")
        if burst is None:
            return self.api.STLTXCont(pps=settings["pps"])
        return self.api.STLTXMultiBurst(
            pps=settings["pps"],
            pkts_per_burst=burst["frames"],
            ibg=burst["gap_us"],
            count=burst["count"],
        )


def main() -> None:
    # TRex prints to standard output: redirect it to standard error, and keep the original for
    # answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child()
    try:
        for line in sys.stdin:
            ask = json.loads(line)
            if ask["op"] == "bye":
                break
            try:
                answer = getattr(child, ask["op"])(ask)
            except Exception as error:
                # TRex's errors contain ANSI colours and several lines.
                text = re.sub(r"\x1b\[[0-9;]*m", "", f"{error}" or repr(error))
                answer = {"error": " ".join(text.replace("*", "").split())}
            answers.write(json.dumps(answer) + "\n")
    finally:
        child.bye()


if __name__ == "__main__":
    main()
