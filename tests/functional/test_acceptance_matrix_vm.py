"""A cell whose VNF is a real VM: rendered by the agent, run by libvirt, and it forwards frames."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from netplugin_zeroloss.journal import read_run

from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.guest import Guest, domain_xml
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.matrix import check_trials, write, zeroloss
from tests.lab.processes import wait_for
from tests.lab.wires import wires

pytestmark = pytest.mark.long

#: Where the generator's flows go, by the end at which they leave (RFC 2544's network for benchmarks).
FAR = ("198.18.0.1", "198.19.0.1")


def test_a_vm_is_the_vnf(tmp_path: Path) -> None:
    """Its kernel is the router: neighbours are static, as nobody answers ARP."""
    with wires() as wired, PrivateLibvirt(BASE / "libvirt") as libvirt:
        with PrivateAgent(BASE / "agent", options=wired.agent_options()) as agent:
            sections = wired.described("vm", agent.url, BASE)
            del sections["overrides"], sections["vnf_cores"]
            template = tmp_path / "domain.xml"
            template.write_text(domain_xml("zeroloss-vm"))
            sections |= {
                "vnf": {"type": "external", "name": "Linux"},
                "vm": {"domain": str(template), "uri": libvirt.uri},
                "search": {
                    "final_duration": 1,
                    "precision": 0.5,
                    "max_trials": 4,
                    "line_rate_pps": 600,
                },
                "matrix": {"backends": ["linuxbridge"], "flows": [4]},
                "timeouts": {"forwarding": 120, "shutdown": 1},
            }
            guest = Guest("zeroloss-vm")
            guest.prepare()
            description, folder = write(tmp_path, sections), tmp_path / "run"
            with subprocess.Popen(
                zeroloss(description, "--folder", folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as running:
                try:
                    wait_for(guest.files.channel.exists, 60, "the domain has been started")
                    route(guest)
                    _, errors = running.communicate(timeout=240)
                finally:
                    running.kill()
                    guest.close()
            run = read_run(folder)
            (record,) = run.records
            check_trials(record)
            assert f"<name>zeroloss-{run.environment['run_id']}</name>" in record.setup["vm"]
            assert record.setup["vm"].count("<interface ") == 2
            assert record.setup["vnf"]["name"] == "Linux", errors
            assert agent.get("/v1/ports") == (200, [])
        assert libvirt.connect().listAllDomains() == [], "the VM was ended with its cell"
    shutil.rmtree(BASE / "agent")


def route(guest: Guest) -> None:
    """Each NIC leads to the far end on its side."""
    guest.attach()
    guest.boot()
    guest.check("echo 1 > /proc/sys/net/ipv4/ip_forward")
    for number, far in enumerate(FAR, 1):
        nic = guest.configure(f"52:54:00:5a:00:0{number}", f"192.0.{number}.1/24")
        guest.check(f"ip route add {far}/32 dev {nic}")
        guest.check(f"arp -i {nic} -s {far} 52:54:00:5a:01:0{number}")
