"""`zeroloss prove` on a simulated NIC: what is shown, each wrong state that fails, and the report."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.matrix import cells, proof, proof_host
from netplugin_zeroloss.matrix.description import read
from netplugin_zeroloss.matrix.proof_host import ProofHost, remaining
from netplugin_zeroloss.matrix.proof_ledger import VM_ID, Failed, NotShown, VfLedger, remove
from netplugin_zeroloss.report.proof import Outcome, Proof, ProofStep, markdown, public

from netplugin.api.errors import BackendUnavailable, CapacityExhausted, NetpluginError, Unsupported
from netplugin.api.models import BackendInfo, Binding, Features, Network, Port, PortSpec, VfInfo
from netplugin.api.physical_models import PhysicalNetworkInfo, VfPoolSpec
from netplugin.host.locks import Locks
from netplugin.host.vf_messages import NO_MAC, NicLink, VfAttributes
from netplugin.tuning.facts import Live, OvsLive, OvsPortLive
from netplugin.tuning.root import Unknown
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.matrix_runs import ROOT, with_agent, write

_NIC, _INDEX, _VFS = "0000:07:00.0", 9, 4
_FREE = VfAttributes(mac=NO_MAC, spoofchk=True, trusted=False)


class Nic:
    """What the kernel says of the NIC and its VFs."""

    def __init__(self, vfs: int) -> None:
        self.vfs = dict.fromkeys(range(vfs), _FREE)
        self.carrier = True

    def link(self, index: int) -> NicLink | None:
        assert index == _INDEX
        return NicLink(index, "eth9", up=True, carrier=self.carrier, vfs=dict(self.vfs))


class Links:
    def find(self, matches: Callable[[str, str, str], bool]) -> list[Any]:
        return []


class VfAgent(MadeUpAgent):
    """Plugs VFs; ``lies``: what the NIC makes of the attributes that it is to have."""

    def __init__(self, nic: Nic) -> None:
        super().__init__()
        self.nic, self.held = nic, 0
        self.lies: Callable[[str, VfAttributes], VfAttributes] = lambda port_id, asked: asked
        self.used: dict[int, str] = {}
        self.by_others: set[int] = set()
        self.kept: VfAttributes | None = None
        features = Features(networks=("vlan", "flat"), virtual_functions=True)
        self.infos.append(BackendInfo(name="sriov", usable=True, features=features))
        pool = VfPoolSpec(devices=(_NIC,))
        self.networks = [PhysicalNetworkInfo(name="left", origin="config", sriov=pool)]

    def list_vfs(self) -> list[VfInfo]:
        return [
            VfInfo(
                pci_address=_vf(number),
                physical_network="left",
                state="claimed" if number in self.used or number in self.by_others else "available",
            )
            for number in self.nic.vfs
        ]

    def choose(self, free: Sequence[int]) -> int:
        if not free:
            raise CapacityExhausted("no VF is free", step="claim")
        return free[0]

    def put_port(self, port_id: str, spec: PortSpec) -> Port:
        if spec.backend != "sriov":
            return super().put_port(port_id, spec)
        mine = next((number for number, port in self.used.items() if port == port_id), None)
        free = [number for number in self.nic.vfs if number not in {*self.used, *self.by_others}]
        number = self.choose(free) if mine is None else mine
        self.used[number] = port_id
        asked = VfAttributes(
            mac=spec.mac,
            vlan=spec.network.vlan_id or 0,
            spoofchk=spec.port_security.enabled,
            trusted=spec.vf.trusted,
            max_mbps=(spec.qos.egress_kbps or 0) // 1000,
        )
        self.nic.vfs[number] = self.lies(port_id, asked)
        extra = {"vif_type": "hostdev", "interface_xml": "<i/>", "pci_address": _vf(number)}
        port = Port(port_id=port_id, state=self.state, spec=spec, binding=Binding.model_validate(extra))
        self.ports[port_id] = port
        return port

    def delete_port(self, port_id: str) -> None:
        super().delete_port(port_id)
        for number in [n for n, port in self.used.items() if port == port_id]:
            del self.used[number]
            self.nic.vfs[number] = self.kept or _FREE

    def list_ports(self, *, vm_id: str | None = None, **_: Any) -> list[Port]:
        return [port for port in self.ports.values() if vm_id in (None, port.spec.vm_id)]


def _vf(number: int) -> str:
    return f"0000:07:10.{number}"


@pytest.fixture
def nic() -> Nic:
    return Nic(_VFS)


@pytest.fixture
def vf_agent(nic: Nic) -> VfAgent:
    return VfAgent(nic)


@pytest.fixture
def host(tmp_path: Path, nic: Nic, monkeypatch: pytest.MonkeyPatch) -> ProofHost:
    devices = tmp_path / "sys/bus/pci/devices"
    (devices / _NIC / "net/eth9").mkdir(parents=True)
    for name, text in (("vendor", "0x8086"), ("device", "0x1572"), ("sriov_totalvfs", str(_VFS))):
        (devices / _NIC / name).write_text(text)
    interface = tmp_path / "sys/class/net/eth9"
    interface.mkdir(parents=True)
    (interface / "ifindex").write_text(str(_INDEX))
    (devices / _NIC / "driver").symlink_to("/drivers/i40e")
    for number in nic.vfs:
        (devices / _vf(number)).mkdir()
        (devices / _NIC / f"virtfn{number}").symlink_to(f"../{_vf(number)}")
    monkeypatch.setattr(proof_host, "Links", Links)
    return ProofHost([_NIC], tmp_path / "sys", nic)  # type: ignore[arg-type]


def _shown(agent: VfAgent, host: ProofHost) -> dict[str, str]:
    """What each step of the ledger ends with, by the last words of its name."""
    ends = [Network(type="flat", physical_network="left")] * 2
    found = {}
    for name, do in VfLedger(agent, host, ends, 0.1).steps():
        try:
            found[name] = f"shown {do()}"
        except (NotShown, Unsupported) as why:
            found[name] = f"not shown {why}"
        except (Failed, NetpluginError) as why:
            found[name] = f"FAILED {why}"
    return {_last(name): text for name, text in found.items()}


def _last(name: str) -> str:
    return "more" if name.endswith("than VFs") else name.split()[-1]


def _outcomes(found: dict[str, str]) -> dict[str, str]:
    return {name: "not shown" if text.startswith("not") else text.split()[0] for name, text in found.items()}


def test_an_honest_nic_is_shown_and_as_before(vf_agent: VfAgent, host: ProofHost, nic: Nic) -> None:
    found = _shown(vf_agent, host)
    assert set(_outcomes(found).values()) == {"shown"}, found
    assert "4 VFs have ports" in found["more"] and "no VF is free" in found["more"]
    assert vf_agent.ports == {} and set(nic.vfs.values()) == {_FREE}


def _keeps_vlan(port_id: str, asked: VfAttributes) -> VfAttributes:
    return replace(asked, vlan=4001)


def _no_check(port_id: str, asked: VfAttributes) -> VfAttributes:
    return replace(asked, spoofchk=False)


def _no_trust(port_id: str, asked: VfAttributes) -> VfAttributes:
    return replace(asked, trusted=False)


def _no_rate(port_id: str, asked: VfAttributes) -> VfAttributes:
    return replace(asked, max_mbps=0)


def _other_mac(port_id: str, asked: VfAttributes) -> VfAttributes:
    return replace(asked, mac="02:00:00:00:00:01")


@pytest.mark.parametrize(
    ("lies", "failed", "seen"),
    [
        (_keeps_vlan, {"VLAN"}, "'vlan': 4001} seen"),
        (_no_check, {"ports"}, "'spoofchk': False"),
        (_no_trust, {"check"}, "'trusted': False"),
        (_no_rate, {"rate"}, "'max_mbps': 0} seen"),
        (_other_mac, {"ports", "again", "VLAN", "check", "rate", "more"}, "02:00:00:00:00:01"),
    ],
)
def test_a_nic_that_has_not_what_was_requested_fails(
    vf_agent: VfAgent,
    host: ProofHost,
    lies: Callable[[str, VfAttributes], VfAttributes],
    failed: set[str],
    seen: str,
) -> None:
    vf_agent.lies = lies
    found = _shown(vf_agent, host)
    assert {name for name, outcome in _outcomes(found).items() if outcome == "FAILED"} == failed, found
    assert all(seen in found[name] for name in failed)


def test_a_put_that_changes_another_vf_fails(vf_agent: VfAgent, host: ProofHost, nic: Nic) -> None:
    puts: list[str] = []

    def lies(port_id: str, asked: VfAttributes) -> VfAttributes:
        puts.append(port_id)
        if len(puts) == 3:
            nic.vfs[3] = replace(_FREE, vlan=7)
        return asked

    vf_agent.lies = lies
    found = _shown(vf_agent, host)
    assert found["again"] == "FAILED VF 0000:07:10.3 vlan: 0 before, 7 now"


def test_a_vf_that_stays_as_it_was_plugged_fails(vf_agent: VfAgent, host: ProofHost) -> None:
    vf_agent.kept = replace(_FREE, vlan=4001)
    assert _shown(vf_agent, host)["unplugged"].startswith("FAILED VF 0000:07:10.0 vlan: 0 before, 4001 now;")


def test_a_vf_that_was_in_use_fails(vf_agent: VfAgent, host: ProofHost) -> None:
    vf_agent.by_others = {0}
    vf_agent.choose = lambda free: 0  # type: ignore[method-assign]
    assert "VF 0000:07:10.0, which was not free" in _shown(vf_agent, host)["ports"]


def test_one_more_port_than_vfs_that_is_accepted_fails(vf_agent: VfAgent, host: ProofHost) -> None:
    vf_agent.choose = lambda free: free[0] if free else 0  # type: ignore[method-assign]
    assert _outcomes(_shown(vf_agent, host))["more"] == "FAILED"


def test_vfs_of_others_are_left_to_them(vf_agent: VfAgent, host: ProofHost, nic: Nic) -> None:
    vf_agent.by_others = {1}
    nic.vfs[1] = theirs = replace(_FREE, vlan=5)
    found = _shown(vf_agent, host)
    assert found.pop("more").startswith("not shown 1 of 4 VFs are not free")
    assert set(_outcomes(found).values()) == {"shown"} and nic.vfs[1] == theirs


def test_what_a_host_lacks_is_not_shown(vf_agent: VfAgent, host: ProofHost, nic: Nic) -> None:
    nic.carrier = False
    found = _shown(vf_agent, host)
    assert "no carrier" in found.pop("rate") and set(_outcomes(found).values()) == {"shown"}
    nic.vfs.clear()
    found = _shown(vf_agent, host)
    assert set(_outcomes(found).values()) == {"not shown"} and "0 of 0 are free" in found["ports"]
    vf_agent.infos.pop()
    assert "the agent cannot use sriov" in _shown(vf_agent, host)["ports"]


def test_what_a_nic_refuses_is_not_shown(vf_agent: VfAgent, host: ProofHost) -> None:
    def lies(port_id: str, asked: VfAttributes) -> VfAttributes:
        if asked.trusted:
            raise Unsupported("the NIC refuses it: trust", step="set-vf")
        return asked

    vf_agent.lies = lies
    assert _shown(vf_agent, host)["check"] == "not shown unsupported at set-vf: the NIC refuses it: trust"


def test_ports_are_removed_when_the_agent_is_back(vf_agent: VfAgent, host: ProofHost) -> None:
    _, do = next(VfLedger(vf_agent, host, [Network(type="flat", physical_network="left")], 0.1).steps())
    do()
    assert len(vf_agent.ports) == 2
    away = [BackendUnavailable("the agent cannot be reached", step="connect")]
    deleted = vf_agent.delete_port

    def delete(port_id: str) -> None:
        if away:
            raise away.pop()
        deleted(port_id)

    vf_agent.delete_port = delete  # type: ignore[method-assign]
    remove(vf_agent, VM_ID, 5.0)
    assert vf_agent.ports == {}


# -- the command ------------------------------------------------------------------------------------


@dataclass
class World:
    """The host on which the command runs: what is there of OVS, and the folder of the report."""

    agent: VfAgent
    file: Path
    folder: Path
    ports: list[OvsPortLive] = field(default_factory=list)

    def run(self) -> int:
        return main(["prove", str(self.file), "--folder", str(self.folder), "--quiet"])

    def ovs(self) -> OvsLive:
        return OvsLive("3.1.0", "22.11", True, {}, tuple(self.ports))

    def steps(self) -> dict[str, tuple[str, str]]:
        read = json.loads((self.folder / "proof.json").read_text())
        return {step["name"]: (step["outcome"], step["found"]) for step in read["steps"]}


@pytest.fixture
def world(
    tmp_path: Path, vf_agent: VfAgent, host: ProofHost, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    sections = with_agent(
        evidence={"ovs_rundir": None},
        matrix={"backends": ["dpdkvhostuser"], "without_pmd": ["dpdkvhostuser"]},
        timeouts={"active": 0.2, "forwarding": 0.2},
        search={"final_duration": 60, "goals": ["csit-pdr"]},
    )
    ends = [{"network": {"type": "flat", "physical_network": "left"}} for _ in range(2)]
    made = World(vf_agent, write(tmp_path, {**sections, "ends": ends}), tmp_path / "proof")
    left = vf_agent.networks[0].model_dump() | {"bridge": "br-acme", "ovs": {"devices": ["net_null0"]}}
    vf_agent.networks = [PhysicalNetworkInfo.model_validate(left)]
    made.ports.append(OvsPortLive("npu1", "npu1", "dpdk", 1500, bridge="br-acme", link=True))
    # The lock is the network namespace's, and other tests may run in it.
    monkeypatch.setattr("netplugin.host.locks._PREFIX", f"\0{os.getpid()}/")
    monkeypatch.setattr(proof, "client", lambda description: vf_agent)
    monkeypatch.setattr("netplugin_zeroloss.matrix.agent_bench.client", lambda description: vf_agent)
    monkeypatch.setattr(proof, "ProofHost", lambda nics: host)
    monkeypatch.setattr(proof, "read_ovs", lambda sockets: made.ovs())
    monkeypatch.setattr(proof, "read_live", lambda sockets, uri: Live(made.ovs(), versions={"qemu": "7.2"}))
    monkeypatch.setattr(proof_host, "driver_info", lambda interface: ("", ""))
    yield made


def test_one_command_shows_all_and_reports_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.run() == 0
    steps, text = world.steps(), (world.folder / "proof.md").read_text()
    assert {outcome for outcome, _ in steps.values()} == {"shown"}, steps
    assert len(steps) == 10 and text in capsys.readouterr().out
    assert text.startswith("# netplugin on 8086:1572, i40e, firmware not reported\n")
    assert "left" not in text and "52:54:00" not in text and "br-acme" not in text
    _, cell = steps["dpdkvhostuser: frames pass a cell"]
    assert "dpdkvhostuser, 64-byte frames, 1,024 flows" in cell and "external in the place of the VM" in cell
    assert world.agent.ports == {} and "pmd" not in world.agent.calls
    assert world.run() == 2, "it is not repeated over its report"


@pytest.mark.parametrize(
    ("ports", "outcome", "found"),
    [
        ([], "FAILED", "1 uplinks in OVS and an active port requested, 0, and the port active seen"),
        (
            [OvsPortLive("npu1", "npu1", "dpdk", 1500, bridge="br-acme", link=False)],
            "not shown",
            "no carrier",
        ),
    ],
)
def test_an_uplink_that_ovs_lacks_fails(
    world: World, ports: list[OvsPortLive], outcome: str, found: str
) -> None:
    world.ports = ports
    assert world.run() == (1 if outcome == "FAILED" else 0)
    seen = world.steps()["dpdkvhostuser: an uplink of OVS"]
    assert seen[0] == outcome and found in seen[1]


def test_ovs_without_dpdk_is_not_shown(world: World) -> None:
    world.agent.infos[0] = BackendInfo(name="dpdkvhostuser", usable=False, reason="OVS has no DPDK")
    assert world.run() == 0
    steps = world.steps()
    for name in ("an uplink of OVS", "frames pass a cell"):
        outcome, found = steps[f"dpdkvhostuser: {name}"]
        assert outcome == "not shown" and "OVS has no DPDK" in found


def test_an_ovs_that_does_not_answer_is_not_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "read_ovs", lambda sockets: Unknown("db.sock", "permission denied"))
    assert world.run() == 0
    outcome, found = world.steps()["dpdkvhostuser: an uplink of OVS"]
    assert outcome == "not shown" and "ovs_rundir of the description" in found


def test_an_agent_that_restarts_in_the_middle_is_not_shown_and_undone(world: World) -> None:
    put, away = world.agent.put_port, iter([False, False, False, True])

    def put_port(port_id: str, spec: PortSpec) -> Port:
        if next(away, False):
            raise BackendUnavailable("the agent at unix:/run/x cannot be reached", step="connect")
        return put(port_id, spec)

    world.agent.put_port = put_port  # type: ignore[method-assign]
    assert world.run() == 0
    steps = world.steps()
    [(name, found)] = [(name, found) for name, (outcome, found) in steps.items() if outcome == "not shown"]
    assert name == "sriov: another VLAN" and "the agent at unix:... cannot be reached" in found
    assert world.agent.ports == {}


def test_a_backend_that_is_not_installed_is_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.file.write_text(world.file.read_text().replace("dpdkvhostuser", "made-up"))
    assert world.run() == 2 and "no backend 'made-up' is installed" in capsys.readouterr().err
    assert world.agent.ports == {}


@pytest.mark.parametrize("backend", ["linuxbridge", "dpdkvhostuser", "vdpa", "sriov"])
@pytest.mark.parametrize("goal", ["", "  preset: rfc2544\n"])
def test_the_cell_of_a_backend_is_short_and_leaves_the_pmd_threads(backend: str, goal: str) -> None:
    text = (ROOT / "tools/trex/matrix.yaml").read_text()
    if goal:
        text = text.replace("  final_duration: 60\n", goal)
    made = proof.short(read(text, "matrix.yaml"), backend)
    run = read(made.model_dump_json(exclude_unset=True), "short.json")
    [cell] = cells.cells(run)
    assert (cell.backend, cell.pmd_cores, cell.frame, cell.queues) == (backend, None, "64", 8)
    assert (run.search.headline.final_trial_s, run.search.goals, run.search.max_trials) == (5.0, (), 12)
    assert run.matrix.fewer_queues == ((backend,) if backend in ("vdpa", "sriov") else ())


def test_frames_that_do_not_pass_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netplugin_zeroloss.matrix.agent_bench.wait_until_forwarding", _no_cable)
    assert world.run() == 1
    outcome, found = world.steps()["dpdkvhostuser: frames pass a cell"]
    assert (outcome, found) == ("FAILED", "frames were to pass: no frame came through")
    assert world.agent.ports == {}


def _no_cable(*_: Any) -> None:
    raise proof.GeneratorError("no frame came through")


def test_vfs_in_use_are_refused_before_anything_changes(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    text = world.file.read_text().replace("dpdkvhostuser", "sriov")
    world.file.write_text(text)
    world.agent.by_others = {0, 1, 2}
    assert world.run() == 2 and "put" not in world.agent.calls and not world.folder.exists()
    assert "2 VFs are needed on left, and 1 of 4 are free" in capsys.readouterr().err
    assert world.agent.used == {}


def test_a_port_of_another_vm_is_left_to_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.agent.put_port("zeroloss-1", _spec("theirs"))
    assert world.run() == 2 and "is there already, of VM theirs" in capsys.readouterr().err
    assert list(world.agent.ports) == ["zeroloss-1"] and not world.folder.exists()


def test_a_second_proof_at_once_is_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    locks = Locks()
    assert locks.take(VM_ID) is None
    try:
        assert world.run() == 2 and "has begun one on this host" in capsys.readouterr().err
    finally:
        locks.close()


def test_what_is_left_fails_and_what_others_plug_does_not(world: World) -> None:
    others = Port(port_id="theirs", state="active", spec=_spec("acme-vm"), binding=None)  # type: ignore[arg-type]
    real = world.ovs

    def ovs() -> OvsLive:
        if "delete" in world.agent.calls:
            world.ports[1:] = [OvsPortLive("left-over", "left-over", "system", 1500, bridge="br-acme")]
        return real()

    world.ovs = ovs  # type: ignore[method-assign]
    assert world.run() == 1
    outcome, found = world.steps()["the host is as before"]
    assert outcome == "FAILED" and found.startswith("OVS left-over: absent before, system on bridge 1 now")
    world.folder = world.folder.with_name("again")
    world.agent.calls.clear()
    deleted = world.agent.delete_port

    def delete(port_id: str) -> None:
        world.agent.ports["theirs"] = others
        deleted(port_id)

    world.agent.delete_port = delete  # type: ignore[method-assign]
    world.ports[1:] = []
    assert world.run() == 0
    outcome, found = world.steps()["the host is as before"]
    assert outcome == "not shown" and found.startswith("others changed 1 ports meanwhile")
    assert "acme" not in found and "theirs" not in found


def _spec(vm_id: str) -> PortSpec:
    network = Network(type="flat", physical_network="left")
    return PortSpec(vm_id=vm_id, mac="52:54:00:00:00:09", backend="linuxbridge", network=network)


def test_what_a_killed_proof_left_is_removed_first(world: World) -> None:
    world.agent.put_port(f"{VM_ID}-0", PortSpec(**{**dict(_spec(VM_ID)), "backend": "sriov"}))
    world.folder.mkdir()
    (world.folder / "before.json").write_text(json.dumps({"VF gone": "there"}))
    assert world.run() == 1
    assert "NIC 0000:07:00.0 driver: absent before, i40e now" in world.steps()["the host is as before"][1]
    assert world.agent.used == {}


def test_an_interrupted_proof_leaves_no_port(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VfLedger, "_limited", interrupted)
    assert world.run() == 130
    assert world.agent.ports == {} and not (world.folder / "before.json").exists()


def test_a_full_disk_leaves_the_report_on_standard_output(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = proof.replacing

    def full(path: Path, mode: int) -> Any:
        if path.name.startswith("proof."):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode)

    monkeypatch.setattr(proof, "replacing", full)
    assert world.run() == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("# netplugin on ") and "No space left on device" in printed.err
    assert world.agent.ports == {}


# -- the report -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("VF 0000:07:10.0 has mac 52:54:00:5a:02:00, vlan 4001", "VF 0000:07:10.0 has mac ..., vlan 4001"),
        ("http://hv1.acme.com:9696/v1 and root@10.1.2.3", "... and ..."),
        ("10.1.2.3/24, fe80::1, 2001:db8:0:0:0:0:0:1", "..., ..., ..."),
        ("of VM 0f9a61f2-6a3e-4d44-9b57-9a0c8a3f1a11: acme-7 on hv1", "of VM ...: VM on HOST"),
        ("/home/alice/key, /sys/bus/pci and 3.1.0", "..., /sys/bus/pci and 3.1.0"),
        ("a\n\x1b[31mb\t|", "a ?[31mb |"),
        ("acme-70 and hv12", "acme-70 and hv12"),
    ],
)
def test_a_report_tells_not_whose_host_it_was(text: str, shown: str) -> None:
    assert public(text, {"acme-7": "VM", "hv1": "HOST", "": "", "a": "never"}) == shown


def test_a_cell_of_the_report_ends_where_it_is_to_end() -> None:
    nic = {"vendor": "8086", "device": "1572", "driver": "i|40e", "firmware": "<b>*1_0*"}
    text = markdown(
        Proof("2026-01-01", {"kernel": "6.12"}, [nic], [ProofStep("a", Outcome.FAILED, "b|c", 1.0)])
    )
    assert "| a | FAILED | b\\|c | 1.0 |" in text and "firmware \\<b>\\*1_0\\*" in text
    assert "0 shown, 0 not shown, 1 FAILED" in text
    assert markdown(Proof("2026-01-01", {}, [], [])).startswith("# netplugin on no PCI device")


def test_driver_and_firmware_are_read_as_ethtool_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(firmware: bytes) -> Callable[..., None]:
        def ioctl(asking: Any, request: int, argument: bytes) -> None:
            name, address = proof_host.struct.unpack("16sP16x", argument)
            assert (request, name.rstrip(b"\0")) == (0x8946, b"eth9")
            filled = proof_host._INFO.pack(3, b"i40e", b"6.12", firmware, b"", b"", b"", 0, 0, 0, 0, 0)
            proof_host.ctypes.memmove(address, filled, len(filled))

        return ioctl

    for firmware, text in (
        (b"8.30 0x8000a49d", "8.30 0x8000a49d"),
        (b"", ""),
        (b"\xff|\x01" + b"x" * 29, "\ufffd|\x01" + "x" * 29),
    ):
        monkeypatch.setattr(proof_host.fcntl, "ioctl", answer(firmware))
        assert proof_host.driver_info("eth9") == ("6.12", text)

    def refuses(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(proof_host.fcntl, "ioctl", refuses)
    assert proof_host.driver_info("eth9") == ("", "")


def test_differences_are_named() -> None:
    assert remaining({"a": "1", "b": "2"}, lambda: {"b": "3", "c": "4"}, 0.0) == [
        "a: 1 before, absent now",
        "b: 2 before, 3 now",
        "c: absent before, 4 now",
    ]
