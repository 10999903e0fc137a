"""The commands of README.md, docs/quick-start.md, docs/operating and others, and their output."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.functional.docs.shell import carry_out
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run

# Where Debian's OVS is, and so where the options point by default; the sandbox has its own /run.
OVS_DIRECTORY = Path("/run/openvswitch")
ADDRESS = "192.0.2.10/32"


@pytest.fixture
def debian_ovs() -> Iterator[PrivateOvs]:
    """An OVS-DPDK at the paths of Debian's own."""
    with PrivateOvs(OVS_DIRECTORY) as ovs:
        yield ovs
    for file in OVS_DIRECTORY.iterdir():
        file.unlink()


def links() -> set[str]:
    return {link["ifname"] for link in json.loads(run(["ip", "-j", "link"]))}


def test_the_quick_start(tmp_path: Path) -> None:
    before = links()
    carry_out("quick-start", tmp_path / "log")
    assert links() == before
    assert "netplugin" not in run(["nft", "list", "tables"])


#: What stands for systemd: the agent, started and awaited as its unit does.
SYSTEMCTL = """#!/bin/sh -eu
pid=/run/agent.pid
case "$1" in
    show) exit 1 ;;
    restart) kill "$(cat $pid)"; while [ -d "/proc/$(cat $pid)" ]; do sleep 0.1; done ;;
esac
netplugin-agent --config-file /etc/netplugin/netplugin.conf 2> /run/agent.log &
echo $! > $pid
curl -sf -o /dev/null --retry 30 --retry-delay 1 --retry-all-errors \\
    --unix-socket /run/netplugin/agent.sock http://localhost/readyz
"""


def test_the_first_port(tmp_path: Path, debian_ovs: PrivateOvs) -> None:
    """As on a host with the package: /etc and /var/lib are this host's, and what is written there is not."""
    before, written = links(), [Path("/etc"), Path("/var/lib")]
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    for number, directory in enumerate(written):
        layers = [Path(f"/run/{name}{number}") for name in ("upper", "work")]
        for layer in layers:
            layer.mkdir()
        options = f"lowerdir={directory},upperdir={layers[0]},workdir={layers[1]}"
        run(["mount", "--no-mtab", "-t", "overlay", "-o", options, "overlay", directory])
    try:
        config = Path("/etc/netplugin/netplugin.conf")
        config.parent.mkdir(mode=0o755)
        config.write_text((ROOT / "etc/netplugin.conf").read_text())
        config.chmod(0o600)
        programs = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        carry_out("first-port", tmp_path / "log", {"PATH": programs})
        assert config.read_text().count("enabled_backends = linuxbridge,dpdkvhostuser\n") == 1
        assert debian_ovs.vsctl("list-br") == "" and links() == before
    finally:
        for directory in written:
            run(["umount", "--lazy", directory])


def test_opennebula_by_hand(tmp_path: Path) -> None:
    before = links()
    carry_out("opennebula", tmp_path / "log", cwd=ROOT)
    assert links() == before


def test_the_commands_on_ovs(tmp_path: Path, debian_ovs: PrivateOvs) -> None:
    carry_out("ovs", tmp_path / "log")
    assert debian_ovs.vsctl("list-br") == ""


def test_a_loop_through_ovs_and_a_guest(tmp_path: Path, debian_ovs: PrivateOvs) -> None:
    carry_out("vhost-user", tmp_path / "log", scratch=tmp_path)
    assert debian_ovs.vsctl("list-br") == ""


def test_the_channels_of_a_nic(tmp_path: Path, debian_ovs: PrivateOvs) -> None:
    carry_out("channels", tmp_path / "log", scratch=tmp_path)
    assert debian_ovs.vsctl("list-br") == ""


def test_the_latency_of_this_machine(tmp_path: Path) -> None:
    carry_out("real-time", tmp_path / "log", scratch=tmp_path)


def test_tcp_between_namespaces(tmp_path: Path) -> None:
    before = links()
    carry_out("tcp", tmp_path / "log", scratch=tmp_path)
    assert links() == before
    assert "netplugin" not in run(["nft", "list", "tables"])


def test_tls_and_tokens(tmp_path: Path) -> None:
    run(["ip", "address", "add", ADDRESS, "dev", "lo"])
    try:
        carry_out("tls", tmp_path / "log")
    finally:
        run(["ip", "address", "delete", ADDRESS, "dev", "lo"])
        shutil.rmtree("/run/netplugin-tls", ignore_errors=True)


def test_a_fleet_of_one_host(tmp_path: Path) -> None:
    before = links()
    try:
        carry_out("fleet", tmp_path / "log")
    finally:
        shutil.rmtree("/run/netplugin-fleet", ignore_errors=True)
    assert links() == before


@pytest.mark.outside
def test_the_installation(tmp_path: Path) -> None:
    """From a copy, for an installation writes into the tree; needs the package index."""
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build")
    shutil.copytree(ROOT, tree, ignore=skipped)
    carry_out("install", tmp_path / "log", {"HOME": str(tmp_path)}, cwd=tree)
    programs = tmp_path / "netplugin/bin"
    listed = run([programs / "netplugin", "--help"], cwd=tmp_path)
    assert "port put" in listed and "backend list" in listed
    assert "--config-file" in run([programs / "netplugin-agent", "--help"], cwd=tmp_path)
    found = "from importlib.metadata import entry_points as e; print(*e(group='netplugin.backends'))"
    backends = run([programs / "python", "-c", found], cwd=tmp_path)
    assert "dpdkvhostuser" in backends and "linuxbridge" in backends
