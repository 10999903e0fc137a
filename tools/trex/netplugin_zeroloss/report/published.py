"""A published table to show with a run's figures, with its source and conditions.

It is never a result of the run. Only the operator knows whether the hardware is comparable: the run
description has a field for it, without which the figures are labelled as measured on other hardware.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from netplugin_zeroloss.journal import Cell, RunRecord


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """Published zero-loss pps by backend and PMD cores (None: without PMD threads), with conditions."""

    name: str
    source: str
    #: Heading of these figures next to those of a run.
    label: str
    #: Test conditions as (name, value).
    conditions: tuple[tuple[str, str], ...]
    #: Frame size; cells of other sizes have no published figure.
    frame: str
    rates_pps: tuple[tuple[str, int | None, float], ...]

    def rate_pps(self, cell: Cell) -> float | None:
        """Return the published rate of a cell, for any flows and queues.

        None were published for frames in bursts, or for a VM that is remote to the NICs.
        """
        if cell.frame != self.frame or cell.burst > 1 or cell.numa == "remote":
            return None
        for backend, cores, rate in self.rates_pps:
            if (backend, cores) == (cell.backend, cell.pmd_cores):
                return rate
        return None


_ZSTACK: Final = "zstack-4.4"
_CONDITIONS: Final = (
    ("host", "Intel Xeon Gold 5218 at 2.30 GHz, 2 NUMA nodes, 256 GB; generator and device alike"),
    ("NIC", "Mellanox ConnectX-6 Dx with 10 GbE optics, which are the ceiling"),
    ("VM", "8 vCPUs host-passthrough, 8 GB, 8 queues, CentOS 7.6"),
    ("VNF", "VPP with main-core 0, corelist-workers 1-7, 8 receive and 8 transmit queues"),
    ("generator", "TRex 2.81, t-rex-64 -f cap2/imix_64_fast.yaml (64-byte frames), -d 120"),
    ("method", "the load was raised until loss first showed"),
    ("caveats", "no CPU isolation or vNUMA tuning"),
)
#: Characters of a run description that are read.
_LONGEST: Final = 1 << 16


def published_for(run: RunRecord, requested: bool) -> PublishedTable | None:
    """Return the table to show with a run: as comparable if its description has that, else if requested.

    It does with ``comparable_to: [zstack-4.4]``. Only this field is read, so that runs with an older
    description format can still be reported.
    """
    # Not needed for the plain table.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    try:
        # Only composed: aliases and merge keys are not replaced by what they stand for.
        root = YAML(typ="safe", pure=True).compose(run.description[:_LONGEST])
    except (YAMLError, RecursionError, ValueError):
        root = None
    fields = root.value if isinstance(root, MappingNode) else ()
    named = next((value for key, value in fields if key.value == "comparable_to"), None)
    if isinstance(named, SequenceNode) and _ZSTACK in [each.value for each in named.value]:
        return zstack("published, comparable hardware")
    return zstack() if requested else None


def zstack(label: str = "published, other hardware") -> PublishedTable:
    """Return the published comparison of the four network schemes of ZStack 4.4."""
    text = (files(__package__) / "data" / "zstack-4.4.csv").read_text(encoding="utf-8")
    rates = tuple(
        (row["scheme"], int(row["pmd_cores"] or 0) or None, round(1e6 * float(row["zero_loss_mpps"])))
        for row in csv.DictReader(io.StringIO(text))
    )
    source = "ZStack 4.4, comparison of its four network schemes"
    return PublishedTable(_ZSTACK, source, label, _CONDITIONS, "64", rates)
