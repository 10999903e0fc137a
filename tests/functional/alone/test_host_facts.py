"""``netplugin host facts|check`` and ``/v1/host`` here, with a real OVS-DPDK, libvirt and guest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libvirt  # type: ignore[import-untyped]
import pytest

from netplugin.host.cpus import format_list, parse_list
from netplugin.tuning import read_live
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import DomainLive, Live, OvsLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.read_live import read_libvirt, read_ovs
from netplugin.tuning.root import Root, Unknown
from netplugin.tuning.steps import Effect, OtherConfig
from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.cgroups import of_cpu_0
from tests.lab.guest import Guest, domain_xml
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for

NAME = "vm-facts"
# vCPU 0, the IO thread and the emulator have their CPUs, vCPU 1 may run on all.
PINNED = """<iothreads>1</iothreads>
  <cputune>
    <vcpupin vcpu='0' cpuset='0'/><emulatorpin cpuset='0'/><iothreadpin iothread='1' cpuset='1'/>
  </cputune>
  <numatune><memory mode='strict' nodeset='0'/></numatune>"""
NETPLUGIN = Path(sys.executable).with_name("netplugin")
PAGES = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
# On a machine with much memory a plan has pages of 1 GB otherwise.
SMALL_PAGES = ("--hugepage-kb", "2048")
DEADLINE_S = 180.0
#: For what will not answer, however long it is waited for; beside it others do.
IMPATIENT_S = 5.0


@dataclass
class Machine:
    """This machine: the OVS has its PMD thread on CPU 0, which is not as planned."""

    ovs: PrivateOvs
    libvirt: PrivateLibvirt
    domain: Any


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    guest = Guest(NAME)
    xml = domain_xml(NAME, vcpus=2).replace("<vcpu>2</vcpu>", f"<vcpu>2</vcpu>{PINNED}")
    with (
        PrivateOvs(BASE / "ovs", pmd_mask="0x1") as ovs,
        PrivateLibvirt(BASE / "libvirt") as daemon,
    ):
        try:
            _add_ports(ovs)
            yield Machine(ovs, daemon, guest.start(daemon.connect(), xml))
        finally:
            guest.close()
            daemon.destroy_domain(NAME)
    shutil.rmtree(BASE)


def _add_ports(ovs: PrivateOvs) -> None:
    """A bond of two vhost-user ports, and a device of DPDK with two queues where nothing comes in."""
    ovs.vsctl("add-br", "br-facts", "--", "set", "Bridge", "br-facts", "datapath_type=netdev")
    members: list[str] = []
    for name in ("v1", "v2"):
        members += ["--", "set", "Interface", name, "type=dpdkvhostuserclient"]
        members += [f"options:vhost-server-path={ovs.directory}/{name}.sock"]
    ovs.vsctl("add-bond", "br-facts", "bond-facts", "v1", "v2", "bond_mode=balance-slb", *members)
    device = ["type=dpdk", "options:dpdk-devargs=net_null0,no-rx=1", "options:n_rxq=2"]
    ovs.vsctl("add-port", "br-facts", "d0", "--", "set", "Interface", "d0", *device)


def _reported(ovs: PrivateOvs) -> OvsLive:
    reported = read_ovs(ovs.sockets)
    assert not isinstance(reported, Unknown), reported
    return reported


def _domain() -> DomainLive:
    domains = read_libvirt().domains
    assert not isinstance(domains, Unknown), domains
    [domain] = domains
    return domain


def _command(machine: Machine, *words: str) -> tuple[int, Any]:
    """The command as it is installed: its exit status and its JSON."""
    rundir = str(machine.ovs.rundir)
    done = subprocess.run(
        [str(NETPLUGIN), "host", *words, "-f", "json", "--ovs-rundir", rundir],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def _by_id(findings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in findings}


def _more_than_there_is() -> int:
    """Memory for VMs, MB, for which the machine has too few pages, whatever it has and others borrow."""
    return 2 * int(PAGES.read_text()) + 512


def _kernel_arguments() -> list[str]:
    """What comes after -- is init's."""
    words = Path("/proc/cmdline").read_text().split()
    return words[: words.index("--")] if "--" in words else words


# -- OVS -------------------------------------------------------------------------------------------


def test_what_a_real_vswitchd_says(machine: Machine) -> None:
    reported = _reported(machine.ovs)
    assert reported.version == machine.ovs.get("Open_vSwitch", ".", "ovs_version")
    assert reported.dpdk_version == machine.ovs.get("Open_vSwitch", ".", "dpdk_version")
    assert reported.dpdk_initialized and reported.other_config == machine.ovs.other_config
    assert [(p.name, p.port, p.type, p.bond_mode) for p in reported.ports] == [
        ("d0", "d0", "dpdk", None),
        ("v1", "bond-facts", "dpdkvhostuserclient", "balance-slb"),
        ("v2", "bond-facts", "dpdkvhostuserclient", "balance-slb"),
    ]
    assert {p.name: p.mtu for p in reported.ports}["d0"] == 1500
    [pmd] = reported.pmds
    assert (pmd.cpu, pmd.numa_node) == (0, 0)
    assert sorted((q.port, q.queue) for q in pmd.queues) == [("d0", 0), ("d0", 1), ("v1", 0), ("v2", 0)]


def test_a_port_has_the_uplinks_of_its_own_bridge_and_those_behind_patches(machine: Machine) -> None:
    """The uplink of br-facts has 1500; a bridge without a patch to it has none."""
    vsctl = machine.ovs.vsctl
    vsctl("add-br", "br-int", "--", "set", "Bridge", "br-int", "datapath_type=netdev")
    run(
        ["ip", "link", "add", "np-v3", "mtu", "9000", "type", "veth", "peer", "name", "np-far", "mtu", "9000"]
    )
    try:
        port = ["type=dpdk", "options:dpdk-devargs=net_null1", "mtu_request=9000"]
        vsctl("add-port", "br-int", "big", "--", "set", "Interface", "big", *port)
        vsctl("add-port", "br-int", "np-v3")
        assert _mtu_findings(machine) == [], "it is on a bridge whose uplink has 9000"
        vsctl("del-port", "big")
        for name, bridge, other in (("np-a", "br-int", "np-b"), ("np-b", "br-facts", "np-a")):
            words = ["type=patch", f"options:peer={other}"]
            vsctl("add-port", bridge, name, "--", "set", "Interface", name, *words)
        [large] = _mtu_findings(machine)
        assert large.endswith("its uplink d0 1500")
    finally:
        run(["ip", "link", "del", "np-v3"])
        vsctl("del-br", "br-int")
        vsctl("--if-exists", "del-port", "np-b")


def _mtu_findings(machine: Machine) -> list[str]:
    live = Live(ovs=_reported(machine.ovs))
    return [f.found for f in check(Scene(read_facts(Root()), live)) if f.id == "mtu" and "port" in f.found]


def test_masks_of_the_planner_are_those_of_real_pmd_threads(machine: Machine) -> None:
    """On a machine of 2 CPUs: housekeeping and VMs on CPU 0, the PMD thread on CPU 1."""
    ovs = machine.ovs
    plan = make_plan(read_facts(Root()), HostIntent(pmd_cores=1, hugepage_kb=2048), Live(ovs=_reported(ovs)))
    masks = {
        step.target.key: step.desired
        for step in plan.steps
        if isinstance(step.target, OtherConfig) and step.target.key.endswith("-mask")
    }
    assert set(masks) == {"pmd-cpu-mask"}
    if os.cpu_count() == 2:
        assert masks == {"pmd-cpu-mask": "0x2"}
    before = ovs.other_config["pmd-cpu-mask"]
    try:
        ovs.set_other_config({"pmd-cpu-mask": str(masks["pmd-cpu-mask"])})
        wait_for(
            lambda: {pmd.cpu for pmd in _reported(ovs).pmds} == plan.partition.polling,
            DEADLINE_S,
            "PMD threads are where the plan has them",
        )
        log = ovs.appctl("dpif-netdev/pmd-rxq-show")
        assert {int(line.split()[5].rstrip(":")) for line in log.splitlines() if "core_id" in line} == (
            plan.partition.polling
        )
    finally:
        ovs.set_other_config({"pmd-cpu-mask": before})


def test_a_mask_that_pins_the_threads_of_vswitchd_is_to_go(machine: Machine) -> None:
    """It counts from the next start, so that those of this one stay where they are."""
    ovs = machine.ovs
    ovs.set_other_config({"dpdk-lcore-mask": "0x1"})
    try:
        live = Live(ovs=_reported(ovs))
        plan = make_plan(read_facts(Root()), HostIntent(pmd_cores=1, hugepage_kb=2048), live)
        [lcores] = [s for s in plan.steps if s.target == OtherConfig("dpdk-lcore-mask")]
        assert (lcores.now, lcores.desired, lcores.effect) == ("0x1", None, Effect.OVS_RESTART)
        assert "lcore-mask" in {f.id for f in check(Scene(read_facts(Root()), live))}
    finally:
        ovs.vsctl("remove", "Open_vSwitch", ".", "other_config", "dpdk-lcore-mask")


def test_a_vswitchd_that_hangs_is_a_finding(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_live, "_WAIT_S", IMPATIENT_S)
    machine.ovs.pause_vswitchd()
    try:
        reported = _reported(machine.ovs)
        assert reported.other_config == machine.ovs.other_config, "the database has it all the same"
        assert reported.pmds == () and reported.silent and "did not answer" in reported.silent.reason
        assert Live(ovs=reported).unanswered() == (reported.silent,)
    finally:
        machine.ovs.resume_vswitchd()
        monkeypatch.undo()
    wait_for(lambda: not _reported(machine.ovs).silent, DEADLINE_S, "vswitchd answers again")


# -- libvirt ---------------------------------------------------------------------------------------


def test_what_a_real_libvirt_says(machine: Machine) -> None:
    reported = read_libvirt()
    everywhere = frozenset(parse_list(Path("/sys/devices/system/cpu/online").read_text()))
    assert reported.domains == (
        DomainLive(
            NAME,
            vcpus=(frozenset((0,)), everywhere),
            emulator=frozenset((0,)),
            memory_nodes=frozenset((0,)),
            iothreads=(frozenset((1,)),),
        ),
    )
    assert reported.versions["libvirt"] == run(["virsh", "--version"]).strip()
    assert reported.versions["qemu"] in run(["qemu-system-x86_64", "--version"])


def test_the_emulators_affinity_is_that_of_its_thread(machine: Machine) -> None:
    """libvirt goes on saying what was requested."""
    pid = int(Path(f"/run/libvirt/qemu/{NAME}.pid").read_text())
    before = os.sched_getaffinity(pid)
    try:
        os.sched_setaffinity(pid, {1})
        assert _domain().emulator == {1}
        assert machine.domain.emulatorPinInfo()[:2] == (True, False)
    finally:
        os.sched_setaffinity(pid, before)


def test_a_libvirtd_that_hangs_is_a_finding(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_live, "_WAIT_S", IMPATIENT_S)
    machine.libvirt.libvirtd.pause()
    try:
        domains = read_libvirt().domains
        assert isinstance(domains, Unknown) and not domains.missing
        assert "did not answer" in domains.reason
    finally:
        machine.libvirt.libvirtd.resume()
        monkeypatch.undo()
    wait_for(
        lambda: not isinstance(read_libvirt().domains, Unknown),
        DEADLINE_S,
        "libvirtd answers again",
    )


# -- the commands, and the agent -------------------------------------------------------------------


def test_facts_are_those_of_this_machine(machine: Machine) -> None:
    status, facts = _command(machine, "facts")
    assert status == 0
    assert facts["cpus"]["online"] == format_list(
        parse_list(Path("/sys/devices/system/cpu/online").read_text())
    )
    assert facts["kernel"]["release"] == os.uname().release
    assert facts["kernel"]["arguments"] == _kernel_arguments()
    for pool in facts["memory"]["pools"]:
        assert pool["total"] == int(Path(pool["path"]).read_text())
    for core in facts["cpus"]["cores"]:
        for thread in parse_list(core["cpus"]):
            at = Path(f"/sys/devices/system/cpu/cpu{thread}")
            assert (at / f"node{core['node']}").exists()
            siblings = (at / "topology/thread_siblings_list").read_text()
            assert core["cpus"] == format_list(parse_list(siblings))
    assert "lo" not in {i["name"] for i in facts["network"]["interfaces"]}
    assert facts["live"]["ovs"]["other_config"]["pmd-cpu-mask"] == "0x1"
    assert facts["live"]["domains"][0]["vcpus"][0] == "0"
    assert set(facts["live"]["versions"]) == {"libvirt", "qemu"}


def test_check_finds_what_is_missing_here(machine: Machine) -> None:
    before = PAGES.read_text().strip()
    desired = ("--vm-memory-mb", str(_more_than_there_is()))
    status, findings = _command(machine, "check", "--pmd-cores", "1", *SMALL_PAGES, *desired)
    found = _by_id(findings)
    assert status == 1
    expected = {f"NUMA node 0 has {n} pages of 2048 KB" for n in (before, PAGES.read_text().strip())}
    assert found["hugepages"]["found"] in expected
    assert found["hugepages"]["status"] == "fail"
    assert found["pmd-isolated"]["found"] == "PMD threads on CPUs 0, isolated are none"
    assert found["plan-kernel-arguments"]["status"] == "warn"
    assert found["pmd-cores"]["status"] == "warn"
    assert found["queues"]["found"].startswith("d0 has 2 receive queues for 1 PMD")
    assert found["bond-hash"]["found"].startswith("bond-facts is balance-slb")
    assert found["domain-pmd"]["status"] == "fail"
    assert found["domain-pmd"]["found"].startswith(f"{NAME}: vCPUs 0-1 may run on CPUs 0")
    assert found["domain-emulator"]["status"] == "warn"


def test_check_without_a_plan_fails_for_what_fails(machine: Machine) -> None:
    """The one check that fails here is the VM on the PMD threads' CPU: it is moved away."""
    status, findings = _command(machine, "check")
    assert status == 1
    assert {f["id"] for f in findings if f["status"] == "fail"} == {"domain-pmd"}
    domain = machine.domain
    try:
        domain.pinEmulator((False, True), libvirt.VIR_DOMAIN_AFFECT_LIVE)
        for vcpu in (0, 1):
            domain.pinVcpu(vcpu, (False, True))
        status, findings = _command(machine, "check")
        assert status == 0
        assert "domain-pmd" not in _by_id(findings) and "domain-emulator" not in _by_id(findings)
        shared = _by_id(findings)["domain-shared"]
        assert shared["found"] == f"CPU 1 is the only one of vCPU 0 of {NAME} and vCPU 1 of {NAME}"
    finally:
        domain.pinEmulator((True, False), libvirt.VIR_DOMAIN_AFFECT_LIVE)
        domain.pinVcpu(0, (True, False))
        domain.pinVcpu(1, (True, True))


def test_the_agent_serves_the_same(machine: Machine) -> None:
    plan = {"pmd_cores": "1", "hugepage_kb": "2048", "vm_memory_mb": str(_more_than_there_is())}
    with PrivateAgent(BASE / "agent", machine.ovs, {"host": plan}) as agent:
        status, state = agent.get("/v1/host")
        assert status == 200
        facts = _command(machine, "facts")[1]
        assert state["facts"]["cpus"] == facts["cpus"]
        assert state["live"]["domains"] == facts["live"]["domains"]
        assert state["live"]["ovs"]["ports"] == facts["live"]["ovs"]["ports"]
        found = _by_id(agent.get("/v1/host/checks")[1])
        assert found["hugepages"]["status"] == found["domain-pmd"]["status"] == "fail"
        machine.libvirt.libvirtd.pause()
        try:
            unseen = _by_id(agent.get("/v1/host/checks")[1])["unknown-fact"]
            assert "qemu:///system: did not answer" in unseen["found"]
        finally:
            machine.libvirt.libvirtd.resume()
        assert "Traceback" not in agent.log.read_text()


# -- what one is not let see -----------------------------------------------------------------------

# Imports all before it is nobody: the virtualenv may be where nobody may look.
AS_NOBODY = """
import contextlib, io, os, sys
from netplugin.cli.main import Netplugin
with contextlib.redirect_stdout(io.StringIO()):
    Netplugin().run(["host", "check", "-f", "json"])
application = Netplugin()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(application.run(sys.argv[1:]))
"""


def test_as_nobody_there_are_facts_and_findings(machine: Machine) -> None:
    def as_nobody(*words: str) -> tuple[int, Any]:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                AS_NOBODY,
                "host",
                *words,
                "-f",
                "json",
                "--ovs-rundir",
                str(machine.ovs.rundir),
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            cwd="/",
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    status, facts = as_nobody("facts")
    assert status == 0
    assert facts["cpus"] == _command(machine, "facts")[1]["cpus"]
    assert "unknown" in facts["live"]["ovs"]
    status, findings = as_nobody("check", "--pmd-cores", "1", *SMALL_PAGES)
    assert status == ("fail" in {finding["status"] for finding in findings})
    unseen = [finding["found"] for finding in findings if finding["id"] == "unknown-fact"]
    assert any(str(machine.ovs.socket) in found for found in unseen), findings
    assert "pmd-mask" not in _by_id(findings), "what was not seen is not judged"


def test_a_control_group_that_gives_less_is_a_finding() -> None:
    with of_cpu_0() as group:
        check = ["host", "check", "--pmd-cores", "1", *SMALL_PAGES, "-f", "json"]
        done = group.run([NETPLUGIN, *check], DEADLINE_S)
    assert done.stderr == ""
    limited = _by_id(json.loads(done.stdout))["cgroup-cpus"]
    assert limited["found"] == "control group /np-limited may run on CPUs 0"
    assert limited["status"] == "warn" and limited["expected"].startswith("CPUs 0-")
