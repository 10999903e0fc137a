"""Detect a host firewall service that flushes all nftables rules, and so the agent's, when it starts."""

from __future__ import annotations

from pathlib import Path

_FILES = ("nftables.conf", "sysconfig/nftables.conf")  # Debian; Fedora and RHEL
_FLUSH = "flush ruleset"


def flushing_file(etc: Path = Path("/etc")) -> str:
    """Return the configuration file of an enabled firewall service that flushes; empty if none."""
    if not any(etc.glob("systemd/system/*.wants/nftables.service")):
        return ""
    for name in _FILES:
        try:
            lines = (etc / name).read_text(errors="replace").splitlines()
        except OSError:
            continue
        if any(line.split("#")[0].strip(" ;\t") == _FLUSH for line in lines):
            return str(etc / name)
    return ""
