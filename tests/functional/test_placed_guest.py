"""A VM placed by the agent and started by libvirt: where the host says its threads and its memory are.

The machine gives CPU 1 to VMs and keeps CPU 0 for all else, so that one VM of a vCPU has room.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import libvirt  # type: ignore[import-untyped]
import pytest

from netplugin.host.cpus import online, parse_list
from tests.lab import kernel
from tests.lab.guest import GUESTS, Guest, apply_tcg_workaround, domain_xml
from tests.lab.hypervisor import BRIDGE_BACKEND, OVS_BACKEND, Hypervisor, Nic
from tests.lab.processes import wait_for

MEMORY_MB = 96
PAGE_KB = 2048
DEADLINE_S = 30.0
QEMU_USER = 64101
PLAN = {
    "pmd_cores": "0",
    "vm_cores": "1",
    "emulator_cores": "0",
    "hugepage_kb": str(PAGE_KB),
    "realtime": "true",
}
#: TCG keeps what it translated in memory, 1 GB by default; in real time that is locked.
SMALL_CACHE = "<features><acpi/><tcg><tb-cache unit='MiB'>64</tb-cache></tcg></features>"
NICS = {backend: Nic(backend, 1) for backend in (OVS_BACKEND, BRIDGE_BACKEND)}


@pytest.fixture(scope="module")
def host() -> Iterator[Hypervisor]:
    hypervisor = Hypervisor((OVS_BACKEND, BRIDGE_BACKEND))
    hypervisor.agent.groups["host"] = PLAN
    with hypervisor as running:
        yield running


@contextmanager
def plugged(host: Hypervisor, *nics: Nic) -> Iterator[None]:
    try:
        for nic in nics:
            host.plug(nic)
        yield
    finally:
        host.destroy(nics)
        host.unplug(nics)


def template(nic: Nic) -> str:
    xml = domain_xml(nic.vm_id, memory_mb=MEMORY_MB).replace("<features><acpi/></features>", SMALL_CACHE)
    assert SMALL_CACHE in xml
    return xml.replace("<os>", "<iothreads>1</iothreads><os>")


def wait_for_pages() -> None:
    """Until those of a VM before are free: vswitchd maps the memory too, and lets go of it by and by."""
    free = Path(f"/sys/kernel/mm/hugepages/hugepages-{PAGE_KB}kB/free_hugepages")
    needed = MEMORY_MB * 1024 // PAGE_KB
    wait_for(lambda: int(free.read_text()) >= needed, DEADLINE_S, f"{needed} hugepages are free")


def render(host: Hypervisor, nic: Nic, xml: str | None = None, **policy: bool) -> tuple[int, Any]:
    body = {"xml": xml or template(nic), "policy": policy}
    return host.agent.call("POST", f"/v1/vms/{nic.vm_id}:render-domain", body)


def placed(host: Hypervisor, nic: Nic, **policy: bool) -> str:
    status, body = render(host, nic, **policy)
    assert status == 200, body
    return str(body["xml"])


def wrong(host: Hypervisor, nic: Nic, xml: str) -> list[dict[str, Any]]:
    findings = host.call("POST", f"/v1/vms/{nic.vm_id}:check-domain", {"xml": xml})
    assert findings
    return [finding for finding in findings if finding["status"] != "ok"]


def threads(pid: int) -> dict[str, tuple[int, frozenset[int]]]:
    """By name: the thread's id and the CPUs that it may run on."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text())
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
        assert allowed is not None
        found[name] = (int(task.name), frozenset(parse_list(allowed[1])))
    return found


def pid_of(name: str) -> int:
    return int(Path(f"/run/libvirt/qemu/{name}.pid").read_text())


def guest_memory(pid: int) -> dict[str, int]:
    """Hugepages of the guest's memory by node, as ``N0``."""
    pages: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if "/dev/hugepages/" in line:
            assert f"kernelpagesize_kB={PAGE_KB}" in line
            for node, count in re.findall(r"\b(N\d+)=(\d+)", line):
                pages[node] = pages.get(node, 0) + int(count)
    return pages


def pinned_to(maps: tuple[bool, ...]) -> frozenset[int]:
    return frozenset(cpu for cpu, may in enumerate(maps) if may)


@pytest.mark.parametrize("backend", [OVS_BACKEND, BRIDGE_BACKEND])
def test_its_threads_and_memory_are_where_the_plan_says(host: Hypervisor, backend: str) -> None:
    assert online() == (0, 1), "the plan of these tests is for a machine of two CPUs"
    nic = NICS[backend]
    with plugged(host, nic):
        xml = placed(host, nic, pin=True)
        assert placed(host, nic, pin=True) == xml
        wait_for_pages()
        guest = Guest(nic.vm_id)
        domain = guest.start(host.libvirt.connect(), apply_tcg_workaround(xml))
        if backend == OVS_BACKEND:
            guest.boot()
        assert [pinned_to(vcpu) for vcpu in domain.vcpus()[1]] == [{1}]
        assert pinned_to(domain.emulatorPinInfo()) == {0}
        assert [pinned_to(thread[1]) for thread in domain.ioThreadInfo()] == [{0}]
        pid = pid_of(nic.vm_id)
        found = threads(pid)
        assert found.pop("CPU 0/TCG")[1] == {1}
        assert {"IO iothread1", "qemu-system-x86"} <= found.keys()
        # The thread that touches the memory at the start does so from all CPUs of the memory's node.
        others = {cpus for name, (_, cpus) in found.items() if not name.startswith("TC ")}
        assert others == {frozenset((0,))}
        assert guest_memory(pid) == {"N0": MEMORY_MB * 1024 // PAGE_KB}
        # libvirt writes much into a domain that nobody requested: none of it is wrong.
        assert wrong(host, nic, domain.XMLDesc()) == []


def test_no_vm_gets_the_cpus_of_another(host: Hypervisor) -> None:
    first, second = NICS[BRIDGE_BACKEND], Nic(BRIDGE_BACKEND, 2)
    with plugged(host, second):
        with plugged(host, first):
            xml = placed(host, first, pin=True)
            status, body = render(host, second, pin=True)
            assert (status, body["code"]) == (507, "capacity_exhausted")
            assert "node 0 has 0 of 1 CPUs" in body["detail"] and body["fix"]
            host.agent.kill()
            host.agent.start()
            assert render(host, second, pin=True)[0] == 507, "the agent remembers"
            assert placed(host, first, pin=True) == xml
        taken = placed(host, second, pin=True)
        assert '<vcpupin vcpu="0" cpuset="1"/>' in taken


def test_what_libvirt_runs_on_a_cpu_is_not_given_to_another(host: Hypervisor) -> None:
    """A VM that somebody pinned by hand, and the agent knows nothing of."""
    nic = NICS[BRIDGE_BACKEND]
    unmanaged = Guest("stranger")
    pin = "<cputune><vcpupin vcpu='0' cpuset='1'/></cputune><os>"
    xml = domain_xml("stranger", memory_mb=64).replace("<os>", pin)
    connection = host.libvirt.connect()
    with plugged(host, nic):
        unmanaged.prepare()
        connection.createXML(xml, libvirt.VIR_DOMAIN_START_PAUSED)
        try:
            assert render(host, nic, pin=True)[0] == 507
            findings = {f["id"]: f["status"] for f in wrong(host, nic, template(nic).replace("<os>", pin))}
            assert findings["vcpu-others"] == "fail"
        finally:
            host.libvirt.destroy_domain("stranger")
        wait_for(lambda: render(host, nic, pin=True)[0] == 200, DEADLINE_S, "CPU 1 is free again")


def test_in_real_time_its_vcpu_is_scheduled_so(host: Hypervisor) -> None:
    """It stays paused: the test machine has no CPU to spare for it. PMD threads must be elsewhere."""
    nic = NICS[BRIDGE_BACKEND]
    mask = "other_config:pmd-cpu-mask"
    before = host.ovs.vsctl("get", "Open_vSwitch", ".", mask).strip()
    with plugged(host, nic), ExitStack() as stack:
        stack.callback(host.ovs.vsctl, "set", "Open_vSwitch", ".", f"{mask}={before}")
        host.ovs.vsctl("set", "Open_vSwitch", ".", f"{mask}=0x1")
        xml = placed(host, nic, pin=True, realtime=True)
        assert wrong(host, nic, xml) == []
        wait_for_pages()
        Guest(nic.vm_id).prepare()
        paused = libvirt.VIR_DOMAIN_START_PAUSED
        assert "<locked/>" in xml
        # Beyond its limit only a process with CAP_SYS_RESOURCE locks memory: root of a container has it not.
        domain = host.libvirt.connect().createXML(xml.replace("<locked/>", ""), paused)
        pid = pid_of(nic.vm_id)
        found = threads(pid)
        vcpu, cpus = found.pop("CPU 0/TCG")
        assert cpus == {1}
        assert os.sched_getscheduler(vcpu) == os.SCHED_FIFO
        assert os.sched_getparam(vcpu).sched_priority == 1
        assert {os.sched_getscheduler(tid) for tid, _ in found.values()} == {os.SCHED_OTHER}
        assert [finding["id"] for finding in wrong(host, nic, domain.XMLDesc())] == ["realtime-memory"]


def test_qemu_runs_as_the_user_that_its_ports_are_for(host: Hypervisor) -> None:
    """No other user reaches the socket, which QEMU makes; it stays paused, and OVS is connected."""
    nic = Nic(OVS_BACKEND, 3, spec_fields={"qemu_user": QEMU_USER})
    with plugged(host, nic):
        # libvirt gives the user what it boots from: not the kernel that all tests have.
        GUESTS.mkdir(parents=True, exist_ok=True)
        own = shutil.copy(kernel.cached().image, GUESTS / "kernel-of-user")
        xml = template(nic).replace(str(kernel.cached().image), str(own))
        status, body = render(host, nic, xml)
        assert status == 200, body
        wait_for_pages()
        Guest(nic.vm_id).prepare()
        connection, paused = host.libvirt.connect(), libvirt.VIR_DOMAIN_START_PAUSED
        connection.createXML(apply_tcg_workaround(body["xml"]), paused)
        assert Path(f"/proc/{pid_of(nic.vm_id)}").stat().st_uid == QEMU_USER
        socket = host.call("GET", f"/v1/ports/{nic.port_id}")["binding"]["socket_path"]
        assert Path(socket).stat().st_uid == Path(socket).parent.stat().st_uid == QEMU_USER
        assert accepted(socket) == 1, "QEMU starts when OVS has come"


def test_qemu_refuses_a_nic_behind_the_iommu_that_ovs_does_not_translate_for(host: Hypervisor) -> None:
    nic = Nic(OVS_BACKEND, 4)
    with plugged(host, nic):
        status, body = render(host, nic)
        assert status == 200, body
        iommu = "<iommu model='intel'><driver intremap='on' iotlb='on'/></iommu>"
        xml = (
            body["xml"]
            .replace("<devices>", f"<devices>{iommu}")
            .replace("<driver queues", "<driver iommu='on' queues")
        )
        xml = xml.replace("</features>", "<ioapic driver='qemu'/></features>")
        [found] = [each for each in wrong(host, nic, xml) if each["id"] == "nic-iommu"]
        assert found["status"] == "fail" and "vhost-iommu-support=true" in found["fix"]
        again = render(host, nic, xml)[1]["xml"]
        assert 'iommu="on"' in again, "it is the VM's"
        wait_for_pages()
        Guest(nic.vm_id).prepare()
        with pytest.raises(libvirt.libvirtError, match="iommu_platform=true is not supported by the device"):
            host.libvirt.connect().createXML(apply_tcg_workaround(again), libvirt.VIR_DOMAIN_START_PAUSED)


def accepted(path: str) -> int:
    """How many connections the server of a UNIX socket has (/proc/net/unix: SS_CONNECTED is 03)."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(line[5] == "03" for line in lines if line[-1] == path)


def test_what_a_platforms_domain_lacks_is_reported(host: Hypervisor) -> None:
    nic = NICS[OVS_BACKEND]
    with plugged(host, nic):
        found = {finding["id"]: finding for finding in wrong(host, nic, template(nic))}
        assert {"nic-missing", "memory-shared"} <= {i for i, f in found.items() if f["status"] == "fail"}
        assert found["vcpu-pinned"]["status"] == "warn"
        assert all(finding["fix"] for finding in found.values())
