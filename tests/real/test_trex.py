"""A real TRex on another host: its stateless server, and batches over SSH."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from netplugin_zeroloss.journal import read_run

from tests.functional.conftest import BASE
from tests.lab.namespaces import entered, namespace, within
from tests.lab.processes import Daemon, run
from tests.real.remote import SshFiles, sshd

ROOT = Path(__file__).resolve().parents[2]
HOST, ADDRESS = "192.0.2.1", "192.0.2.2"
NETNS, ENDS = "zl-generator", ("zlgen0", "zlgen1")
MACS = ("52:54:00:5a:00:01", "52:54:00:5a:00:02")


def trex_configuration(ends: tuple[str, str], core: int = 1) -> str:
    """All of TRex on one core, on kernel devices; the destinations are those of nobody."""
    interfaces = [
        f"--vdev=net_af_packet{number},iface={end},framesz=2048,framecnt=16384,qdisc_bypass=1"
        for number, end in enumerate(ends)
    ]
    return yaml.safe_dump(
        [
            {
                "version": 2,
                "port_limit": 2,
                "interfaces": interfaces,
                "low_end": True,
                "low_end_core": core,
                "limit_memory": 512,
                "prefix": "zeroloss",
                "port_info": [
                    {"src_mac": f"02:00:00:00:00:0{n}", "dest_mac": f"02:00:00:00:0a:0{n}"} for n in (1, 2)
                ],
            }
        ]
    )


@contextmanager
def reachable(netns: str, address: str = ADDRESS) -> Iterator[None]:
    """Join a namespace to this one, as another host, by a wire of its own."""
    run(["ip", "link", "add", "zlctl", "type", "veth", "peer", "name", "zlctl0", "netns", netns])
    try:
        run(["ip", "address", "add", f"{HOST}/30", "dev", "zlctl"])
        run(["ip", "link", "set", "zlctl", "up"])
        run(within(netns, ["ip", "address", "add", f"{address}/30", "dev", "zlctl0"]))
        run(within(netns, ["ip", "link", "set", "zlctl0", "up"]))
        yield
    finally:
        run(["ip", "link", "delete", "zlctl"])


@contextmanager
def server(netns: str | None, trex: Path, configuration: Path, log: Path) -> Iterator[Daemon]:
    """A stateless TRex in a namespace, ready for its client."""
    command = [trex / "t-rex-64", "-i", "--no-scapy-server", "--cfg", configuration]
    there = within(netns, ["sh", "-c", 'cd "$0" && exec "$@"', trex, *command])
    with Daemon("trex", there, log) as running:
        running.wait_for(_answers, 180, "it answers")
        yield running


def _answers() -> bool:
    try:
        with socket.create_connection((ADDRESS, 4501), 1.0):
            return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Generator:
    """A host with two ports that a wire joins."""

    ssh: SshFiles
    configuration: Path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Generator]:
    with namespace(NETNS), reachable(NETNS):
        run(within(NETNS, ["ip", "link", "add", ENDS[0], "type", "veth", "peer", "name", ENDS[1]]))
        for name in ENDS:
            run(within(NETNS, ["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1"]))
            run(within(NETNS, ["ip", "link", "set", name, "up"]))
        configuration = tmp_path / "trex_cfg.yaml"
        configuration.write_text(trex_configuration(ENDS))
        BASE.mkdir(parents=True, exist_ok=True)
        with sshd(NETNS, ADDRESS, BASE / "ssh") as files:
            yield Generator(files, configuration)
        shutil.rmtree(BASE / "ssh")


def search(folder: Path, generator: dict[str, Any], burst: int = 1) -> dict[str, Any]:
    """A short search through the command; the result."""
    description = {
        "name": "trex",
        "generator": generator,
        "search": {
            "final_duration": 10,
            "initial_duration": 1,
            "precision": 0.2,
            "max_trials": 6,
            "line_rate_pps": 20_000,
        },
        "matrix": {
            "backends": ["loopback"],
            "without_pmd": ["loopback"],
            "flows": [16],
            "bursts": [burst],
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(description))
    program = [sys.executable, "-W", "ignore", ROOT / "tools/trex/zeroloss.py", "matrix", path]
    done = subprocess.run(
        [*program, "--folder", folder / "run"], capture_output=True, text=True, timeout=400, check=False
    )
    print(done.stdout, done.stderr)
    [record] = read_run(folder / "run").records
    assert record.result is not None, record.error
    return dict(record.result)


def test_a_batch_over_ssh(trex: Path, host: Generator, tmp_path: Path) -> None:
    """Its ports are joined by a wire. Its frames have the addresses of the description."""
    ports = [{"source_mac": f"02:00:00:00:01:0{n}", "destination_mac": mac} for n, mac in enumerate(MACS, 1)]
    generator = {
        "type": "trex-stf",
        "machine": host.ssh.machine(ADDRESS),
        "trex_dir": str(trex),
        "trex_cfg": str(host.configuration),
        "macs": ports,
    }
    with entered(NETNS):
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    with ear:
        ear.bind((ENDS[1], 0x0800))
        result = search(tmp_path, generator)
        frame, (_, _, direction, _, _) = ear.recvfrom(64, socket.MSG_DONTWAIT)
        while direction == socket.PACKET_OUTGOING:
            frame, (_, _, direction, _, _) = ear.recvfrom(64, socket.MSG_DONTWAIT)
    assert (frame[:6].hex(":"), frame[6:12].hex(":")) == (MACS[0], ports[0]["source_mac"])
    passed = [trial["measured"] for trial in result["trial_log"] if trial["verdict"] == "passed"]
    assert passed and all(trial["tx_packets"] == trial["rx_packets"] > 0 for trial in passed), result


@pytest.mark.parametrize("burst", [1, 64])
def test_the_stateless_server_of_another_host(
    trex: Path, host: Generator, tmp_path: Path, burst: int
) -> None:
    generator = {
        "type": "trex-stl",
        "trex_dir": str(trex),
        "server": ADDRESS,
        "paths": [{"send": 0, "receive": 1}, {"send": 1, "receive": 0}],
    }
    with server(NETNS, trex, host.configuration, tmp_path / "log"):
        result = search(tmp_path, generator, burst)
    passed = [trial["measured"] for trial in result["trial_log"] if trial["verdict"] == "passed"]
    assert passed and all(trial["tx_packets"] == trial["rx_packets"] > 0 for trial in passed), result
