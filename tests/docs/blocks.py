"""Fenced blocks of the documentation, with what their first lines say of them.

The first word behind the fence is the language. Words after it are for the tests and not shown:
``run=NAME`` puts a ``bash`` block into the session NAME, in the order of its pages;
``on=HOST`` says of two hosts on which (``both``: on the destination, then on the source);
``not-run=REASON`` says why one is in none (words joined by ``-``);
``output`` on a ``text`` block says that it is what the block before it prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

DOCS = ROOT / "docs"
#: The sessions and their pages, in the order in which they are carried out. How is in tests/functional/docs;
#: of those that need no root, zeroloss is in tests/unit/zeroloss, and the others are in
#: tests/docs/test_how_to.py.
SESSIONS: dict[str, tuple[Path, ...]] = {
    "install": (ROOT / "README.md",),
    "quick-start": (DOCS / "quick-start.md",),
    "first-port": (DOCS / "install.md",),
    "ovs": (
        DOCS / "operating/ovs.md",
        DOCS / "operating/ports.md",
        DOCS / "operating/networks.md",
        DOCS / "operating/service-ports.md",
        DOCS / "operating/status.md",
        DOCS / "operating/monitoring.md",
        DOCS / "operating/store.md",
        DOCS / "pmd.md",
        DOCS / "operating/async.md",
        DOCS / "operating/install.md",
    ),
    "tls": (DOCS / "operating/access.md",),
    "fleet": (DOCS / "operating/fleet.md",),
    "opennebula": (DOCS / "opennebula.md",),
    "migration": (DOCS / "live-migration.md",),
    "zeroloss": (
        DOCS / "zeroloss.md",
        DOCS / "zeroloss/search.md",
        DOCS / "zeroloss/generators.md",
        DOCS / "zeroloss/matrix.md",
        DOCS / "zeroloss/report.md",
        DOCS / "zeroloss/compare.md",
    ),
    "vhost-user-dry": (DOCS / "how-to/vhost-user.md",),
    "vhost-user": (DOCS / "how-to/vhost-user.md",),
    "real-time-dry": (DOCS / "how-to/real-time.md",),
    "real-time": (DOCS / "how-to/real-time.md",),
    "channels-dry": (DOCS / "how-to/channels-and-numa.md",),
    "channels": (DOCS / "how-to/channels-and-numa.md",),
    "tcp-dry": (DOCS / "how-to/tcp-between-vms.md",),
    "tcp": (DOCS / "how-to/tcp-between-vms.md",),
    "compare-backends": (DOCS / "how-to/compare-backends.md",),
}

_FENCE = re.compile(r"^```(\S*)(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str
    words: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        words = dict(word.partition("=")[::2] for word in match[2].split())
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[3], words))
    return found


def session(name: str) -> list[tuple[Block, Block | None]]:
    """The blocks of a session, each with the output the page shows right after it."""
    found: list[tuple[Block, Block | None]] = []
    for page in map(blocks, SESSIONS[name]):
        for number, block in enumerate(page):
            if block.words.get("run") == name:
                after = page[number + 1] if number + 1 < len(page) else None
                found.append((block, after if after and "output" in after.words else None))
    return found


def output_matches(shown: str, printed: str) -> bool:
    """Whether it was printed, in one piece; ``...`` stands for anything, space is one for all."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in shown.split("...")]
    return re.search(r"\s*.*?\s*".join(parts), printed, re.DOTALL) is not None
