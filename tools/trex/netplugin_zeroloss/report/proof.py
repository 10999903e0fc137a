"""The report of a proof, to attach to an issue: without what tells whose host it was."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from netplugin.host.processes import printable
from netplugin_zeroloss.report.table import escape, row

_LONGEST: Final = 400
#: URLs, users at hosts, UUIDs, MAC and IP addresses, and paths other than the kernel's.
_IDENTIFIES: Final = re.compile(
    r"https?://[^\s,;]+|[\w.-]+@[\w.-]+|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b|\b(\d{1,3}\.){3}\d{1,3}(?!\.?\d)(/\d+)?|[0-9a-f:]*::[0-9a-f:]*"
    r"|\b([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}\b|(?<![\w/.-])/(?!sys/|proc/|dev/)[^\s,;:'\"]+",
    re.IGNORECASE,
)


class Outcome(StrEnum):
    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class ProofStep:
    """``found``: what was seen, or why nothing was."""

    name: str
    outcome: Outcome
    found: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Proof:
    """``software``: versions by name; ``nics``: fields of each NIC, the same of all."""

    date: str
    software: Mapping[str, str]
    nics: Sequence[Mapping[str, str]]
    steps: Sequence[ProofStep]


def public(text: str, names: Mapping[str, str]) -> str:
    """Return a text on one line, with others for these names, and without addresses and paths."""
    # Short ones tell nothing, and are in other words.
    chosen = sorted((re.escape(name) for name in names if len(name) > 2), key=len, reverse=True)
    text = re.sub(rf"(?<![\w-])({'|'.join(chosen) or '$.'})(?![\w-])", lambda found: names[found[0]], text)
    return printable(" ".join(_IDENTIFIES.sub("...", text).split()))[:_LONGEST]


def markdown(proof: Proof) -> str:
    """Return the report as text for an issue."""
    heads = (f"{n['vendor']}:{n['device']}, {n['driver']}, firmware {n['firmware']}" for n in proof.nics)
    counts = (f"{sum(step.outcome is each for step in proof.steps)} {each}" for each in Outcome)
    found = f"{proof.date}: {', '.join(counts)}. A rate is that of one short search, and promises nothing."
    lines = [f"# netplugin on {escape('; '.join(dict.fromkeys(heads)) or 'no PCI device')}", "", found]
    for table in (map(asdict, proof.steps), proof.nics, [proof.software]):
        for number, each in enumerate(table):
            lines += [] if number else ["", row(list(each)), row(["---"] * len(each))]
            lines.append(row([str(value) for value in each.values()]))
    return "\n".join((*lines, ""))
