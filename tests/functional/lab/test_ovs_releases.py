"""That the daemons are of the Open vSwitch that was chosen, with its own libraries."""

from __future__ import annotations

import os
from pathlib import Path

from tests.lab.ovs import PrivateOvs


def test_daemons_and_tools_are_of_one_version(ovs: PrivateOvs) -> None:
    version = ".".join(map(str, ovs.version))
    for target, daemon in (("ovs-vswitchd", ovs.vswitchd), ("ovsdb-server", ovs.ovsdb)):
        assert ovs.appctl("version", target=target).split("\n")[0].endswith(f"(Open vSwitch) {version}")
        assert os.readlink(f"/proc/{daemon.pid}/exe").startswith(f"{ovs.programs.prefix}/")
        mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert f"{ovs.programs.prefix}/lib/x86_64-linux-gnu/libc.so.6" in mapped
    assert ovs.get("Open_vSwitch", ".", "ovs_version") == version
