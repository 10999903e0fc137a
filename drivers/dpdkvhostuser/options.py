"""Options of the dpdkvhostuser backend. The options of OVS itself are in ``[ovs]``."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

GROUP = "dpdkvhostuser"
OPTIONS = [
    cfg.BoolOpt(
        "guest_hugepages",
        default=True,
        help="Require hugepages for the memory of a VM (recommended: small pages cost TLB misses on every "
        "packet). False requires shared memory only.",
    ),
]


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
