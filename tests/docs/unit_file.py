"""The systemd unit as a value, for tests that run what it says."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import ROOT

UNIT = ROOT / "etc/systemd/netplugin-agent.service"


def settings(path: Path = UNIT) -> dict[str, list[str]]:
    """The words of each setting, those of one that stands several times together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            found.setdefault(name, []).extend(value.split())
    return found


def environment() -> dict[str, str]:
    """What the unit adds to the agent's environment."""
    return dict(word.split("=", 1) for word in settings()["Environment"])
