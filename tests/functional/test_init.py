"""``netplugin init`` refuses a NIC below the bridge of the SSH session or of the default route."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.processes import CommandError, run

UPLINK, BRIDGE, ADDRESS = "nic0", "br0", "192.0.2.7"


@pytest.fixture
def nic() -> Iterator[None]:
    run(["ip", "link", "add", UPLINK, "type", "veth", "peer", "name", "wire0"])
    try:
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
        run(["ip", "link", "set", UPLINK, "master", BRIDGE])
        run(["ip", "address", "add", f"{ADDRESS}/24", "dev", BRIDGE])
        for name in (UPLINK, "wire0", BRIDGE):
            run(["ip", "link", "set", name, "up"])
        yield
    finally:
        for name in (BRIDGE, UPLINK):
            run(["ip", "link", "delete", name])


def init(config: Path, *flags: str, ssh: str = "") -> str:
    command = [sys.executable, "-m", "netplugin.cli.main", "init", "--backend", "linuxbridge"]
    command += ["--physical-network", "p", "--uplink", UPLINK, "--config-file", str(config), *flags]
    # As sudo starts it: the variable is that of a process above.
    shell = ["sh", "-c", 'env -u SSH_CONNECTION "$@"; exit $?', "sh", *command]
    return run(shell, env={"SSH_CONNECTION": ssh}, timeout=60)


def test_the_nic_of_an_ssh_session_or_of_the_default_route_is_refused(tmp_path: Path, nic: None) -> None:
    config = tmp_path / "netplugin.conf"
    ssh = f"192.0.2.9 50022 {ADDRESS} 22"
    assert f"physical_interfaces = p:{UPLINK}" in init(
        config, "--dry-run", ssh="192.0.2.9 50022 192.0.2.8 22"
    )
    with pytest.raises(CommandError, match=f"--uplink: {UPLINK} carries .*--allow-in-use"):
        init(config, ssh=ssh)
    run(["ip", "route", "add", "default", "via", "192.0.2.1"])
    with pytest.raises(CommandError, match=f"--uplink: {UPLINK} carries"):
        init(config)
    assert not config.exists()
    assert f"Wrote {config}" in init(config, "--allow-in-use", ssh=ssh)
    assert config.read_text().endswith(f"\n[linuxbridge]\nphysical_interfaces = p:{UPLINK}\n")
