"""A VM that boots under libvirt and QEMU on a port of the vdpa backend in mode vduse, on OVS 4.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from netplugin.libvirt.domain import RENDER, complete, parse_domain, written
from tests.lab import guest as guests
from tests.lab.driven import Driven
from tests.lab.guest import Guest, apply_tcg_workaround, domain_xml
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.namespaces import namespace
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.nested.vduse_host import (
    WAIT_S,
    address,
    agent_on,
    delete_refused,
    gone,
    into,
    mac,
    make_spec,
    netdev,
    pings,
    served_by,
    settled,
)

pytestmark = [
    pytest.mark.long,
    # A guest of their own: the other tests in it have the machine's own OVS.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(3000),
]
#: Both the VM and the host that it runs on are emulated.
BOOT_S = 600.0


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with served_by("forky") as private:
        yield private


@pytest.fixture
def process(ovs: PrivateOvs, tmp_path: Path) -> Iterator[Driven]:
    with agent_on(ovs, Path("/run/np-agent") / tmp_path.name) as made:
        yield made


def rendered(bindings: list[Any]) -> str:
    """The domain with its NICs. Its clock is slowed down, or the ticks of its timer take all of the CPU."""
    parsed = parse_domain(domain_xml("vm1"), RENDER)
    complete(parsed, bindings)
    root = etree.fromstring(apply_tcg_workaround(written(parsed)))
    line = root.find(f"{{{guests.QEMU_NS}}}commandline")
    assert line is not None
    for word in ("-icount", "shift=7,sleep=on"):
        etree.SubElement(line, f"{{{guests.QEMU_NS}}}arg", value=word)
    return etree.tostring(root, encoding="unicode")


def test_a_vm_of_libvirt_and_a_container_on_one_vlan(process: Driven, ovs: PrivateOvs) -> None:
    vm = Guest("vm1")
    with namespace("nb"), PrivateLibvirt() as libvirtd:
        into("nb", process.put("b", netdev(2)), 2)
        domain = vm.start(libvirtd.connect(), rendered([process.put("a", make_spec(1))]))
        vm.boot(BOOT_S)
        vm.configure(mac(1), f"{address(1)}/24")
        vm.wait_pings(address(2), WAIT_S)
        assert vm.pings(address(2), 5) and pings("nb", 1, 5)
        ovs.kill_vswitchd()
        ovs.start_vswitchd()
        process.wait_for_ovs()
        wait_for(lambda: settled(process), WAIT_S, "it is right again")
        vm.wait_pings(address(2), WAIT_S)
        delete_refused(process, "a")
        assert vm.pings(address(2)), "it still has its network"
        vm.close()
        domain.destroy()

        wait_for(lambda: gone(process, "a"), WAIT_S, "it is removed")
        process.delete("b")
