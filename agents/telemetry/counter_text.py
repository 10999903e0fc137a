"""The counters of ports and uplinks in the text format of Prometheus.

``prometheus_client`` takes ten times as long for the samples of 1,000 ports as the host takes to count them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from agents.telemetry.port_counters import Known, Snapshot, clock
from netplugin.api.counter_models import Place, Traffic

_T = Traffic
#: Each family: its name without ``_total``, and its help.
_FAMILIES = {
    "netplugin_port_packets": "Packets of a port; to_vm is what its VM receives.",
    "netplugin_port_bytes": "Bytes of a port, likewise.",
    "netplugin_port_ring_retries": "Attempts to put packets into a full ring of the guest, not yet lost.",
    "netplugin_port_dropped": "Packets of a port that were dropped, by place, without places of no drops.",
    "netplugin_uplink_packets": "Packets of an uplink.",
    "netplugin_uplink_bytes": "Bytes of an uplink.",
    "netplugin_uplink_dropped": "Packets that an uplink has dropped, by place.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
#: Of the traffic of a port and of an uplink: the rest of the family's name, and the label of the direction.
_DIRECTIONS = {
    _T.PACKETS_FROM_VM: ("packets", "from_vm", "received"),
    _T.PACKETS_TO_VM: ("packets", "to_vm", "sent"),
    _T.BYTES_FROM_VM: ("bytes", "from_vm", "received"),
    _T.BYTES_TO_VM: ("bytes", "to_vm", "sent"),
}


def counter_text(snapshots: Iterable[Snapshot]) -> bytes:
    """The lines of all families that have samples."""
    counters: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    since: list[str] = []
    read: list[str] = []
    today = time.time() - clock()
    for snapshot in snapshots:
        if snapshot.at is None:
            continue
        backend = _escaped(snapshot.backend)
        read.append(f'netplugin_counters_read_seconds{{backend="{backend}"}} {round(snapshot.at + today)}')
        for port_id, port in snapshot.ports.items():
            labels = (
                f'port="{port_id}",vm="{port.vm_id}",network="{_escaped(port.network)}",backend="{backend}"'
            )
            _add(counters, since, "port", labels, port, today)
        for device, uplink in snapshot.uplinks.items():
            labels = f'device="{_escaped(device)}",network="{_escaped(uplink.network)}",backend="{backend}"'
            _add(counters, since, "uplink", labels, uplink, today)
    lines: list[str] = []
    for name, samples in counters.items():
        if samples:
            lines += [f"# HELP {name}_total {_FAMILIES[name]}", f"# TYPE {name}_total counter", *samples]
    for name, words, samples in (
        ("netplugin_counters_since_seconds", "When the counters of a port or an uplink began.", since),
        ("netplugin_counters_read_seconds", "When the counters of a backend were last read.", read),
    ):
        if samples:
            lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge", *samples]
    return "".join(f"{line}\n" for line in lines).encode()


def _add(
    counters: dict[str, list[str]], since: list[str], kind: str, labels: str, known: Known, today: float
) -> None:
    """``today``: what is added to a time of ``clock`` for the time of day."""
    is_port = kind == "port"
    for source, track in known.tracks.items():
        if not track.source.values:
            continue
        since.append(
            f'netplugin_counters_since_seconds{{{labels},source="{source}"}} {round(track.since + today)}'
        )
        for key, value in track.totals().items():
            if isinstance(key, Place):
                if value:
                    samples = counters[f"netplugin_{kind}_dropped"]
                    samples.append(f'netplugin_{kind}_dropped_total{{{labels},place="{key.value}"}} {value}')
            elif key is _T.RING_RETRIES:
                if value and is_port:
                    counters[f"netplugin_{kind}_ring_retries"].append(
                        f"netplugin_{kind}_ring_retries_total{{{labels}}} {value}"
                    )
            else:
                family, *directions = _DIRECTIONS[key]
                name, direction = f"netplugin_{kind}_{family}", directions[not is_port]
                counters[name].append(f'{name}_total{{{labels},direction="{direction}"}} {value}')


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)
