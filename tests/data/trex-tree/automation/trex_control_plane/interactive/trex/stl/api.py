"""A stand-in for ``trex.stl.api``: a client that plays recorded statistics, as ``$TREX_PLAY`` (JSON) says.

| member | meaning |
| --- | --- |
| recording | the statistics at the end, of real runs with TRex 3.08 |
| seconds | how long sending them takes; the counters grow evenly |
| share_back | this part of what was sent has come back, instead of what was recorded |
| before | counters that there are before: of an earlier session |
| refuse | what is answered to ``connect``, ``acquire`` or ``get_pgid_stats``: {"connect": "text"} |
| latency | "gone": no stream is in the statistics of latency |
| wraps | counters are of so many bits |
| log | a file to which each call is written, a JSON object a line |
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

_PLAY = json.loads(os.environ["TREX_PLAY"])
_COUNTERS = ("opackets", "ipackets", "ierrors", "oerrors")


def _log(call, **what):
    if "log" in _PLAY:
        with open(_PLAY["log"], "a") as file:
            file.write(json.dumps({"call": call, **what}) + "\n")


class TRexError(Exception):
    pass


class StatNotAvailable(str):
    """As TRex: what the server has not told, and no number."""

    def __new__(cls, _name):
        return super().__new__(cls, "N/A")


class _Answer:
    def __init__(self, data):
        self._data = data

    def data(self):
        return self._data


class STLClient:
    def __init__(self, **where):
        _log("client", **where)
        file = Path(os.environ["TREX_RECORDINGS"]) / f"{_PLAY['recording']}.json"
        self._end = json.loads(file.read_text())
        self._total = self._end["stats"]["0"]["opackets"]
        self._began = None
        self._sent = 0.0
        self.conn = self.rpc = self

    def connect(self):
        self._maybe_refuse("connect")

    def acquire(self, ports, force):
        _log("acquire", ports=ports, force=force)
        if not force:
            self._maybe_refuse("acquire")

    def _maybe_refuse(self, call):
        if call in _PLAY.get("refuse", {}):
            raise TRexError(_PLAY["refuse"][call])

    def get_all_ports(self):
        return [0, 1]

    def get_server_version(self):
        return {"version": "v3.08"}

    def get_port_info(self, ports):
        return [{"index": p, "speed": 10.0, "driver": "net_fake", "is_prom_supported": "yes"} for p in ports]

    def set_port_attr(self, ports, promiscuous):
        _log("promiscuous", ports=ports)

    def remove_all_streams(self, ports):
        _log("remove", ports=ports)

    def add_streams(self, streams, ports):
        for stream in streams if isinstance(streams, list) else [streams]:
            _log("stream", ports=ports, **stream.shown())

    def start(self, ports, mult, duration, force):
        _log("start", ports=ports, mult=mult, duration=duration)
        self._began = time.monotonic()

    def stop(self, ports, rx_delay_ms):
        _log("stop", ports=ports)
        self._sent, self._began = self._part(), None

    def disconnect(self):
        _log("disconnect")

    def is_traffic_active(self, ports):
        return self._began is not None and self._part() < 1

    def _part(self):
        if self._began is None:
            return self._sent
        return min(1.0, (time.monotonic() - self._began) / _PLAY["seconds"])

    def get_stats(self, ports):
        part, end = self._part(), self._end["stats"]
        sent = {n: int(end[n]["opackets"] * part) for n in ("0", "1")}
        back = {n: int(end[n]["ipackets"] * part) for n in ("0", "1")}
        if "share_back" in _PLAY:
            back = {"0": 0, "1": int(sent["0"] * _PLAY["share_back"])}
        before, most = _PLAY.get("before", 0), 1 << _PLAY.get("wraps", 64)
        return {
            int(n): {
                "opackets": (sent[n] + before) % most,
                "ipackets": (back[n] + before) % most,
                "ierrors": int(end[n]["ierrors"] * part),
                "oerrors": 0,
            }
            for n in ("0", "1")
        }

    def get_pgid_stats(self, pgid_list):
        """As TRex: keys of the histogram are integers. The first stream has none, and no number."""
        _log("pgid", ids=pgid_list)
        self._maybe_refuse("get_pgid_stats")
        if _PLAY.get("latency") == "gone":
            return {"flow_stats": {}}
        found = ({20: 900, 30: 99, 100: 1}, 111)
        lost = ({}, StatNotAvailable("total_max"))
        return {
            "latency": {"global": {"old_flow": 0, "bad_hdr": 0}}
            | {
                number: {
                    "latency": dict(zip(("histogram", "total_max"), found if n % 2 else lost, strict=True)),
                    "err_cntrs": {"dropped": 0 if n % 2 else 500, "out_of_order": 0},
                }
                for n, number in enumerate(pgid_list)
            }
        }

    def transmit(self, method):
        assert method == "get_global_stats"
        part, end = self._part(), self._end["raw_global"]
        return _Answer(
            {
                name: int(end[name] * part) + _PLAY.get("before", 0)
                for name in ("m_total_queue_drop", "m_total_queue_full")
            }
        )


class _Shown:
    """What it was made of, to be logged."""

    def __init__(self, *positional, **named):
        self._positional, self._named = positional, named

    def shown(self):
        shown = {name: _shown(value) for name, value in self._named.items()}
        return shown | ({"": [_shown(v) for v in self._positional]} if self._positional else {})


class _Layer(_Shown):
    """Layers are put together with ``/``; the length is that of real headers."""

    size = 0

    def __truediv__(self, other):
        packet = Packet()
        packet.layers = [*getattr(self, "layers", [self]), *getattr(other, "layers", [other])]
        return packet

    def __len__(self):
        layers = getattr(self, "layers", [self])
        return sum(len(one) if isinstance(one, bytes) else one.size for one in layers)


class Packet(_Layer):
    def shown(self):
        headers = [one for one in self.layers if not isinstance(one, bytes)]
        return {"size": len(self)} | {type(one).__name__: one._named for one in headers}


class Ether(_Layer):
    size = 14


class IP(_Layer):
    size = 20


class UDP(_Layer):
    size = 8


class STLVmFlowVar(_Shown):
    pass


class STLVmWrFlowVar(_Shown):
    pass


class STLVmFixIpv4(_Shown):
    pass


class STLPktBuilder(_Shown):
    pass


class STLTXCont(_Shown):
    pass


class STLTXMultiBurst(_Shown):
    pass


class STLFlowLatencyStats(_Shown):
    pass


class STLStream(_Shown):
    pass


class STLProfile:
    def __init__(self, streams):
        self._streams = streams

    def get_streams(self):
        return self._streams

    @staticmethod
    def load_py(file, direction, port_id, tunables):
        spec = importlib.util.spec_from_file_location("profile", file)
        module = importlib.util.module_from_spec(spec)
        # As TRex: a profile may import what is beside it.
        sys.path.insert(0, os.path.dirname(file))
        spec.loader.exec_module(module)
        sys.path.remove(os.path.dirname(file))
        profile = module.register()
        return STLProfile(profile.get_streams(direction=direction, port_id=port_id, tunables=tunables))


def _shown(value):
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return value.shown() if isinstance(value, _Shown) else value
