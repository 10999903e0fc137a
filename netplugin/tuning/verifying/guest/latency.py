"""Measure the wake-up latency of vCPUs with cyclictest inside the VM."""

from __future__ import annotations

from pathlib import Path

from netplugin.libvirt.vm_image import Image
from netplugin.tuning.verifying import cyclictest
from netplugin.tuning.verifying.guest.shell import GuestShell, lacks
from netplugin.tuning.verifying.result import LatencyRound, LatencySettings

PROGRAM, PACKAGE = "cyclictest", "rt-tests"
_FILE = Path("/run/netplugin-cyclictest.json")
#: Seconds for start and end, in addition to the measurement: a VM without KVM is slow.
_MARGIN_S = 180.0


def require(image: Image) -> None:
    """Check before the VM is started, if the image has a list of its packages. Raises: BackendUnavailable."""
    packages = image.manifest.packages
    if packages and PACKAGE not in packages:
        raise lacks(PROGRAM, PACKAGE)


def require_in(shell: GuestShell) -> None:
    """Check the VM itself. Raises: BackendUnavailable."""
    shell.needs(PROGRAM, PACKAGE)


def measure(shell: GuestShell, vcpus: int, settings: LatencySettings) -> tuple[str, LatencyRound]:
    """Run cyclictest once; return its version and the histograms.

    ``vcpus``: number of the VM's. Raises: NetpluginError.
    """
    words = cyclictest.arguments(settings, _FILE, set(range(vcpus)))
    shell.run(words, settings.round_s + _MARGIN_S)
    return cyclictest.parsed(shell.run(["cat", str(_FILE)]), "the VM")
