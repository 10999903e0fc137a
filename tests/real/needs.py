"""``python -m tests.real.needs``: say what these tests need and this machine lacks, one sentence each.

Without a package the exit status is 1. Tests of a tree that is not there are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Debian packages with the programs of these tests.
PACKAGES = (
    *("openvswitch-switch-dpdk", "dpdk", "libvirt-daemon", "libvirt-daemon-driver-qemu", "qemu-system-x86"),
    *("libvirt-daemon-system", "busybox-static", "iproute2", "kmod", "util-linux", "tcpreplay"),
    *("openssh-client", "openssh-server", "tcpdump"),
)
#: By the variable that names a tree: whose it is, its program, and what has to be there besides.
TREES = {
    "NETPLUGIN_TREX_DIR": ("TRex", "t-rex-64", "automation/trex_control_plane/interactive"),
    "NETPLUGIN_VPP_DIR": ("VPP", "bin/vpp", "lib"),
}
#: Of the emulated VFs, as its plug-in of VPP has it (net/e1000 of DPDK).
VF_DRIVER = b"net_e1000_igb_vf"


def packages() -> Iterator[str]:
    """Yield a sentence for each package that is not installed; none where dpkg is not the packager."""
    if shutil.which("dpkg-query") is None:
        return
    command = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\\n", *PACKAGES]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    for package in PACKAGES:
        if f"{package} installed" not in printed:
            yield f"The Debian package {package} is not installed: apt-get install {package}."


def trees(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Yield the variable of each tree that cannot be used, with a sentence."""
    for variable, (whose, program, more) in TREES.items():
        named = environment.get(variable)
        if not named:
            yield variable, f"{variable} names no tree of {whose}: tests with {whose} are skipped."
            continue
        for part in (program, more):
            if not (Path(named) / part).exists():
                yield variable, f"{variable} is {named}, and this tree of {whose} has no {part}."
                break


def lacks_vfs(environment: Mapping[str, str] = os.environ) -> str:
    """What a tree of VPP lacks for VFs, in a sentence; empty if nothing, or there is no such tree."""
    named = environment.get("NETPLUGIN_VPP_DIR")
    plugins = Path(named or os.devnull).rglob("dpdk_plugin.so")
    if not named or any(VF_DRIVER in plugin.read_bytes() for plugin in plugins):
        return ""
    return f"The VPP of {named} has no driver of VFs (DPDK's net/e1000): the test of all backends is skipped."


def main() -> int:
    missing = list(packages())
    for sentence in (*missing, *(sentence for _, sentence in trees()), *filter(None, [lacks_vfs()])):
        print(f"tests/real: {sentence}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
