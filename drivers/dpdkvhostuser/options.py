"""The options of the dpdkvhostuser backend (OVS itself is in ``[ovs]``, which backends share)."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

GROUP = "dpdkvhostuser"
OPTIONS = [
    cfg.BoolOpt(
        "guest_hugepages",
        default=True,
        help="Whether a VM's memory must be hugepages (as it should: with small pages every packet "
        "costs TLB misses). False asks for shared memory only.",
    ),
]


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
