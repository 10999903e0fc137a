"""The command line, run in this process against the real agent."""

from __future__ import annotations

import csv
import io
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lxml import etree

import agents.host.pmd
from netplugin.api.errors import HostError
from netplugin.api.models import Finding, PortSpec
from netplugin.api.pmd_models import AutoLoadBalanceRequest, PmdRequest, PmdState, UnpolledQueue
from netplugin.cli.main import main
from netplugin.cli.tables import cut_to_fit
from netplugin.host.shared import Host
from netplugin.host.usability import Usability
from netplugin.pmd.propose import propose
from netplugin.pmd.read import PmdCounters, PmdReading
from tests.unit.agent import SPEC, Agent, agent, served_agent
from tests.unit.core.pmd_states import core, queue
from tests.unit.fakes import FakeBackend, FakeHost

FLAGS = "--vm-id vm-1 --mac 52:54:00:12:34:56 --backend fake --physical-network physnet1 --vlan-id 100"

Terminal = Callable[[int], None]


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"NETPLUGIN_{name}", raising=False)


@pytest.fixture(autouse=True)
def quiet_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is in this process too: what it logs is not what the command prints."""
    monkeypatch.setattr(logging.getLogger("agents"), "propagate", False)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    with agent(tmp_path) as made, served_agent(made) as url:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        yield made


class Run:
    """Runs a command line; what it printed is in ``out`` and ``err``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, line: str) -> int:
        try:
            return main(shlex.split(line))
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            self.out, self.err = self._capsys.readouterr()

    def json(self, line: str) -> Any:
        assert self(f"{line} -f json") == 0, self.err
        assert self.err == ""
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def test_port_from_put_to_delete(run: Run, running: Agent) -> None:
    port = run.json(f"port put p1 {FLAGS}")
    assert (port["port_id"], port["state"]) == ("p1", "active")
    assert port["spec"] == PortSpec.model_validate(SPEC).model_dump(mode="json")
    assert run.json("port show p1")["binding"]["vif_type"] == "tap"
    [row] = run.json("port list")
    assert row["network"]["vlan_id"] == 100
    assert row["error"] is None
    assert run("port delete p1 p1 p2") == 0
    assert (run.out, run.err) == ("", "")
    assert running.host.ports == {}


def test_tables_are_for_people(run: Run, running: Agent) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    assert "network.vlan_id: 100" in run.out
    assert run("port list") == 0
    assert "vlan physnet1 100" in run.out
    running.host.on_apply = _refuse
    del running.host.ports["p1"]
    assert run("reconcile") == 1
    assert "out of luck" in run.out
    assert run("port show p1") == 0
    assert "host_error: out of luck" in run.out
    assert "Fix: have some" in run.out


def test_a_port_is_shown_as_the_xml_of_its_interface(run: Run, running: Agent) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    assert run("port show p1 --xml") == 0
    assert etree.fromstring(run.out).tag == "interface" and run.err == ""
    assert run.json("port show p1 --xml") == {
        "interface_xml": run.json("port show p1")["binding"]["interface_xml"]
    }


@pytest.mark.parametrize("form", ["csv", "value"])
def test_a_list_for_scripts_has_no_words_of_python(run: Run, running: Agent, form: str) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    assert run(f"port list -f {form}") == 0
    [row] = csv.DictReader(io.StringIO(run.out)) if form == "csv" else [run.out]
    assert "None" not in run.out and "{" not in run.out
    if isinstance(row, dict):
        assert (row["network"], row["error"]) == ("vlan physnet1 100", "")
    assert run(f"backend list -f {form}") == 0
    assert "None" not in run.out and "True" not in run.out and "true" in run.out and "{'" not in run.out
    assert run(f"network put net-1 --vni 5 --peer 192.0.2.1 --peer 192.0.2.2 {'-f value'}") == 0
    assert "192.0.2.1,192.0.2.2" in run.out.splitlines()


def test_a_structure_for_scripts_is_json(run: Run, running: Agent) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    for form in ("value", "shell"):
        assert run(f"port show p1 -f {form} -c spec -c error") == 0
        assert "None" not in run.out and "'" not in run.out
    assert run("port show p1 -f value -c spec") == 0
    assert json.loads(run.out) == run.json("port show p1")["spec"]


def test_a_column_that_there_is_not_is_named(run: Run, running: Agent) -> None:
    assert run("port list -c portid") == 1
    assert "there is no column portid; did you mean port_id?" in run.err and "('" not in run.err


def test_a_fix_names_the_command_and_in_json_the_call(run: Run, running: Agent) -> None:
    assert run("port put p1 --vm-id v --mac 52:54:00:12:34:56 --backend fake --network-id net-7") == 1
    assert "Fix: netplugin network put net-7" in run.err
    assert run("port put p1 --vm-id v --mac 52:54:00:12:34:56 --backend fakee --physical-network n") == 1
    assert "did you mean fake?" in run.err
    found = Finding(id="x", status="fail", found="f", expected="e", fix='PUT /v1/pmd {"proposed": true}')
    running.service.health.ignored = (found,)
    assert run("backend check -f value") == 1
    assert "netplugin pmd set --proposed" in run.out
    assert run("backend check -f json") == 1
    assert json.loads(run.out)[0]["fix"] == found.fix


def _refuse(change: object) -> None:
    raise HostError("out of luck", step="apply", fix="have some")


@pytest.mark.parametrize("line", ["port put --help", "help port put"])
def test_help_of_a_command_is_its_own(run: Run, line: str) -> None:
    assert run(line) == 0
    assert "usage: netplugin port put" in run.out and "--backend" in run.out


@pytest.mark.parametrize("line", ["", "--help"])
def test_help_without_a_command_lists_the_commands(run: Run, line: str) -> None:
    assert run(line) == 0
    assert "port put" in run.out and "--config-file" not in run.out


def test_filters_are_passed_on(run: Run, running: Agent) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    assert len(run.json("port list --vm-id vm-1 --state active --backend fake --network physnet1")) == 1
    for nothing in ("--vm-id vm-2", "--state failed", "--backend other", "--network physnet2"):
        assert run.json(f"port list {nothing}") == []


def test_ports_change_their_vlan(run: Run, running: Agent) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    [row] = run.json("port retag --network physnet1 --from-vlan 100 --to-vlan 200")
    assert (row["port_id"], row["state"], row["error"]) == ("p1", "active", None)
    assert running.host.ports["p1"].network.vlan_id == 200
    assert run("port retag --network physnet1 --from-vlan 100 --to-vlan 200") == 0
    assert "no port was changed" in run.err
    assert run("port retag p1 p2 --to-vlan 300 -f json") == 1
    assert [(row["port_id"], row["error"] and row["error"]["code"]) for row in json.loads(run.out)] == [
        ("p1", None),
        ("p2", "not_found"),
    ]
    assert run("port retag --to-vlan 300") == 1 and "network and from_vlan, or ports" in run.err


def test_spec_from_a_file_and_from_standard_input(
    run: Run, running: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPEC))
    assert run.json(f"port put p1 --spec {path}")["spec"]["vm_id"] == "vm-1"
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(SPEC)))
    options = "--queues 4 --mtu 9000 --allowed-address 10.0.0.5 --allowed-address 2001:db8::/64"
    spec = run.json(f"port put p2 --spec - {options} --vlan-id 7")["spec"]
    assert (spec["queues"], spec["network"]["mtu"], spec["network"]["vlan_id"]) == (4, 9000, 7)
    addresses = [entry["ip"] for entry in spec["port_security"]["allowed_addresses"]]
    assert addresses == ["10.0.0.5", "2001:db8::/64"]
    assert not run.json(f"port put p3 --spec {path} --no-port-security")["spec"]["port_security"]["enabled"]
    names = "--port-name tap4 --vhost-user-socket /run/vms/vm-1/net.sock"
    spec = run.json(f"port put p4 --spec {path} {names}")["spec"]
    assert (spec["port_name"], spec["vhost_user_socket"]) == ("tap4", "/run/vms/vm-1/net.sock")


def test_network_type_follows_from_the_options(run: Run, running: Agent) -> None:
    base = "port put p1 --vm-id vm-1 --mac 52:54:00:12:34:56 --backend fake"
    assert run.json(f"{base} --physical-network physnet1")["spec"]["network"]["type"] == "flat"
    assert run(f"{base} --network-id net-1") == 1
    assert "there is no network 'net-1'" in run.err
    run.json("network put net-1 --vni 5001")
    assert run.json(f"{base} --network-id net-1")["spec"]["network"]["type"] == "vxlan"
    assert run(f"{base} --network-type vlan --physical-network physnet1") == 1
    assert "vlan_id is required" in run.err


def test_networks(run: Run, running: Agent) -> None:
    put = "network put net-1 --vni 5001 --peer 10.0.0.2 --peer 10.0.0.3 --mtu 1400"
    expected = {
        "network_id": "net-1",
        "vni": 5001,
        "udp_port": 4789,
        "mtu": 1400,
        "peers": ["10.0.0.2", "10.0.0.3"],
        "local_vlan": 1,
        "ports": 0,
    }
    assert run.json(put) == expected
    assert run.json("network list") == [expected]
    assert run("network put net-2 --vni 5001") == 1
    assert "VNI 5001 is network net-1's" in run.err
    assert run("network put net-2 --vni 5002 --peer 224.0.0.1") == 1
    assert "peers.0" in run.err
    assert run("network delete net-1") == 0
    assert run.json("network list") == []


def test_what_the_backends_found(run: Run, running: Agent) -> None:
    assert run.json("backend check") == []
    running.host.usability = Usability(False, "no cable", "plug it in")
    assert run("backend check -f json") == 1
    found = json.loads(run.out)
    assert [(f["id"], f["status"], f["fix"]) for f in found] == [("fake-unusable", "fail", "plug it in")]


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        ("{", "no JSON (line 1, column 2)"),
        ("[]", "not a JSON object"),
        ('{"network": []}', "network"),
        ('{"network": "x", "port_security": 7}', "port_security"),
        ('{"vm_id": "../x"}', "vm_id"),
        ('{"colour": 1}', "colour"),
    ],
)
def test_a_wrong_spec_is_reported_in_one_line(
    run: Run, running: Agent, tmp_path: Path, spec: str, reported: str
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(spec)
    assert run(f"port put p1 --spec {path} --no-port-security --mtu 1500") == 1
    assert reported in run.err
    assert run.err.startswith("netplugin: invalid_request at ")
    assert run.err.count("\n") == 1
    assert running.host.written == []


def test_errors_are_one_line_and_status_1(run: Run, running: Agent) -> None:
    assert run("port show nope") == 1
    assert (run.out, run.err) == ("", "netplugin: not_found at lookup: there is no port nope\n")
    assert run("port put p1 --spec /nonexistent") == 1
    assert "/nonexistent" in run.err
    assert run("port delete ../x") == 1
    assert "delete.0" in run.err


def test_each_port_that_could_not_be_deleted_is_named(run: Run, running: Agent) -> None:
    for port_id in ("p1", "p2"):
        assert run(f"port put {port_id} {FLAGS}") == 0

    def refuse_p1(change: Any) -> None:
        if "p1" in change.ports:
            _refuse(change)

    running.host.on_apply = refuse_p1
    assert run("port delete p1 p2") == 1
    assert list(running.host.ports) == ["p1"]
    assert "p1: host_error at apply: out of luck" in run.err
    assert "p2" not in run.err


def test_agent_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", "http://127.0.0.1:1")
    assert run("port list") == 1
    assert run.err.count("\n") == 1
    assert "http://127.0.0.1:1 cannot be reached" in run.err
    assert "Fix: is the agent running" in run.err


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", "http://127.0.0.1:1")
    assert run("--debug port list") == 1
    assert "Traceback" in run.err


def test_usage(run: Run) -> None:
    assert run("") == 0
    assert "domain render" in run.out
    assert run("port put") == 2
    assert run("pmd set --cpus 1 --count 1") == 2
    assert run("no such") == 2


def test_backend_list(run: Run, running: Agent) -> None:
    running.host.usability = Usability(False, "no hugepages", "reserve some")
    [backend] = run.json("backend list")
    assert backend["usable"] is False
    assert backend["features"]["max_queues"] == 8
    assert run("backend list") == 0
    assert "reserve some" in run.out


@pytest.fixture
def pmd_asked(running: Agent, monkeypatch: pytest.MonkeyPatch) -> list[PmdRequest]:
    """The requests that came to an OVS with two PMD threads, one of which polls nearly all."""
    asked: list[PmdRequest] = []

    def set_pmd(ovs: object, request: PmdRequest, chosen: object) -> PmdState:
        asked.append(request)
        return PMD.state

    there = SimpleNamespace(usable=lambda: Usability(True))
    monkeypatch.setattr(Host, "ovs_of_others", property(lambda self: there))
    monkeypatch.setattr(agents.host.pmd, "look", lambda ovs, usage_s=None: PMD)
    monkeypatch.setattr(agents.host.pmd, "set_pmd", set_pmd)
    monkeypatch.setattr(agents.host.pmd.Pmd, "_choose", lambda self, request, scene: ())
    return asked


PMD = PmdReading(
    PmdState(
        cpus="2-3",
        unpolled=(UnpolledQueue(port="npv7", queue=1, port_id="p7"),),
        cores=(
            core(
                2,
                queue("dpdk0", 1, 60, pinned_to=5, port_numa_node=1),
                queue("vm1", 0, 35),
                isolated=True,
                packets=4000,
                cycles_per_packet=250.5,
                processing_cycles_per_packet=200.0,
                upcalls=7,
                lost_upcalls=1,
                overhead_percent=3,
            ),
            core(3, queue("npv1", 0, 5, port_id="p1", vm_id="vm-1")),
        ),
    ),
    {2: PmdCounters(4000, 1000, 500)},
)


def test_pmd_show(run: Run, pmd_asked: list[PmdRequest]) -> None:
    assert run.json("pmd show") == PMD.state.model_dump(mode="json")
    assert run("pmd show") == 0
    for text in (
        "cpu 2 (NUMA node 0, isolated): busy not measured, overhead 3 %, 4000 packets, 250.5 cycles a "
        "packet (200 processing), 7 upcalls, 1 of them lost",
        "cpu 3 (NUMA node 0): busy not measured",
        "  dpdk0 queue 1: 60 %, pinned to CPU 5, port on NUMA node 1",
        "  vm1 queue 0: 35 %",
        "  port p1 of VM vm-1 queue 0: 5 %",
        "port p7 queue 1",
        "auto_load_balance.load_threshold: 95",
    ):
        assert text in run.out
    measured = run.json("pmd show --interval 0.01")
    assert (measured["interval_s"], measured["cores"][0]["packets"]) == (0.01, 0)
    for wrong in ("0", "61", "nan"):
        assert run(f"pmd show --interval {wrong}") == 1
        assert "interval" in run.err


def test_pmd_show_a_proposal(run: Run, pmd_asked: list[PmdRequest]) -> None:
    expected = propose(PMD.state).model_dump(mode="json")
    assert expected["moves"] == 1
    assert run.json("pmd show --propose") == run.json("pmd show --propose --interval 0.01") == expected
    assert run("pmd show --propose") == 0
    lines = [[word for word in line.split() if word != "|"] for line in run.out.splitlines()]
    for row in (
        "queues queue node load PMD now PMD proposed",
        "dpdk0 1 1 60 % 2 2",
        "vm1 0 - 35 % 2 3 *",
    ):
        assert row.split() in lines


def test_pmd_set(run: Run, pmd_asked: list[PmdRequest]) -> None:
    assert run.json("pmd set --count 2") == PMD.state.model_dump(mode="json")
    for line, request in {
        "--cpus 2-3": PmdRequest(cpus="2-3"),
        "--count 4 --siblings": PmdRequest(count=4, siblings=True),
        "--affinity a:b:1=3 --affinity x:00=2 --affinity x:1=4": PmdRequest(
            affinity={"a:b": {"1": 3}, "x": {"0": 2, "1": 4}}
        ),
        "--clear-affinity a --clear-affinity b": PmdRequest(clear_affinity=("a", "b")),
        "--clear-affinity": PmdRequest(clear_all_affinity=True),
        "--auto-lb on --auto-lb-load 80": PmdRequest(
            auto_load_balance=AutoLoadBalanceRequest(enabled=True, load_threshold=80)
        ),
        "--auto-lb off": PmdRequest(auto_load_balance=AutoLoadBalanceRequest(enabled=False)),
        "--auto-lb-improvement 5 --auto-lb-interval 9": PmdRequest(
            auto_load_balance=AutoLoadBalanceRequest(improvement_threshold=5, interval_minutes=9)
        ),
        "--proposed": PmdRequest(proposed=True),
    }.items():
        assert run(f"pmd set {line}") == 0, run.err
        assert pmd_asked[-1] == request
    before = len(pmd_asked)
    for line, reported in {
        "--cpus 'a b'": "cpus",
        "": "nothing to set",
        "--proposed --count 1": "proposed",
        "--siblings": "siblings goes with count",
        "--affinity p:1=9999": "affinity.p.1",
        "--auto-lb-load 101": "load_threshold",
    }.items():
        assert run(f"pmd set {line}") == 1
        assert reported in run.err
    for pin in ("p", "p:1", "p=1", ":1=2", "p:x=1", "p:1=x"):
        assert run(f"pmd set --affinity {pin}") == 2
    assert len(pmd_asked) == before


def test_reconcile(run: Run, running: Agent) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    del running.host.ports["p1"]
    plan = run.json("reconcile --dry-run")
    assert (plan["dry_run"], [c["ports"] for c in plan["changes"]]) == (True, [["p1"]])
    assert running.host.ports == {}
    assert run.json("reconcile")["errors"] == []
    assert "p1" in running.host.ports


def test_reconcile_with_a_lost_store(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost({"old": PortSpec.model_validate(SPEC)})
    with agent(tmp_path, backends={"fake": FakeBackend("fake", host)}) as made:
        with served_agent(made) as url:
            monkeypatch.setenv("NETPLUGIN_URL", url)
            assert run.json("reconcile")["orphans_kept"] == ["old"]
            assert list(host.ports) == ["old"]
            assert run.json("reconcile --remove-orphans")["orphans_kept"] == []
            assert host.ports == {}


def test_domain_render(run: Run, running: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(f"port put p1 {FLAGS}") == 0
    path = tmp_path / "domain.xml"
    path.write_text("<domain><name>a</name></domain>")
    assert run(f"domain render vm-1 --xml {path}") == 0
    assert etree.fromstring(run.out).findtext("name") == "a"
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text()))
    domain = run.json("domain render vm-1 --xml - --numa-node 0")
    assert etree.fromstring(domain["xml"]).find("devices/interface") is not None
    assert run(f"domain render vm-1 --xml {path} --numa-node=-1") == 1
    assert "numa_node" in run.err
    assert run(f"domain render vm-2 --xml {path}") == 1
    assert "no ports" in run.err
    assert run("domain render vm-1 --xml /nonexistent") == 1


# -- Lists on a terminal. ----------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    """Makes standard output a terminal of the given width."""

    def make(width: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))

    return make


def _longest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_findings_that_do_not_fit_the_terminal_are_blocks(
    run: Run, running: Agent, terminal: Terminal
) -> None:
    words = "reserve hugepages-2M on node 0 " * 5
    running.host.usability = Usability(False, "no hugepages", words.strip())
    assert run("backend check") == 1
    table = run.out
    assert table.startswith("+---") and _longest(table) > 200
    complete = {}
    for form in ("json", "yaml", "csv", "value"):
        assert run(f"backend check -f {form}") == 1
        complete[form] = run.out
    terminal(60)
    assert run("backend check") == 1
    assert run.err == ""
    first, found, expected, fix, *more = run.out.splitlines()
    assert first == "fail  fake-unusable"
    assert found == "    found     no hugepages"
    assert expected == "    expected  backend fake is usable"
    assert fix.startswith("    fix       reserve hugepages-2M on node 0")
    assert all(line.startswith(" " * 14) and line[14] != " " for line in more)
    assert " ".join([fix[14:], *(line[14:] for line in more)]) == words.strip()
    assert _longest(run.out) <= 60
    for form, text in complete.items():
        assert run(f"backend check -f {form}") == 1
        assert (run.out, run.err) == (text, "")
    assert run("backend check -c status -c found") == 1
    assert "| fail   | no hugepages |" in run.out
    terminal(_longest(table))
    assert run("backend check") == 1
    assert run.out == table


def test_a_table_that_does_not_fit_the_terminal_is_cut_or_becomes_blocks(
    run: Run, running: Agent, terminal: Terminal
) -> None:
    vm_id = "v" * 60
    assert run(f"port put p1 {FLAGS} --vm-id {vm_id}") == 0
    assert run("port list") == 0
    whole = run.out
    terminal(110)
    assert run("port list") == 0
    assert _longest(run.out) == 110
    assert f"| {'v' * 26}... | fake    | 52:54:00:12:34:56 | vlan physnet1 100 |" in run.out
    assert run.err == "netplugin: values that end in ... are cut; -f json prints them whole\n"
    assert run.json("port list")[0]["vm_id"] == vm_id
    terminal(80)
    assert run("port list") == 0
    assert run.err == ""
    assert run.out.splitlines()[:3] == ["p1", f"    vm_id    {vm_id}", "    backend  fake"]
    assert "error" not in run.out  # there is none
    assert run("port list --max-width 100") == 0  # cliff's own layout, for who asks for it
    assert run.out.startswith("+---")
    terminal(_longest(whole))
    assert run("port list") == 0
    assert (run.out, run.err) == (whole, "")


@pytest.mark.parametrize("width", range(1, 130))
def test_a_fitted_table_is_no_wider_than_the_terminal(width: int) -> None:
    names = ("id", "mac", "text")
    rows = [["i" * 36, "52:54:00:12:34:56", "two\n" + "long " * 9], ["i", "", ""]]
    fitted = cut_to_fit(names, rows, width)
    if fitted is None:
        assert width < 36 + 17 + 20 + 10
        return
    assert [row[:2] for row in fitted] == [row[:2] for row in rows]
    assert 36 + 17 + max(4, _longest(fitted[0][2])) + 10 <= width
    assert (fitted == rows) == (width >= 36 + 17 + 45 + 10)


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ("port list", "`netplugin port put`"),
        ("port list --vm-id vm-2", "without --vm-id"),
        ("network list", "`netplugin network put`"),
        ("vf list", "[sriov] devices"),
        ("backend check", "no findings"),
    ],
)
def test_an_empty_list_is_reported_to_people(
    run: Run, running: Agent, terminal: Terminal, command: str, reported: str
) -> None:
    assert run.json(command) == []
    assert run(command) == 0
    assert run.out == "\n"  # as cliff prints it
    printed_without_terminal = run.err
    terminal(80)
    assert run(command) == 0
    assert run.out == ""
    assert run.err == printed_without_terminal
    assert reported in run.err and run.err.startswith("netplugin: no ") and run.err.count("\n") == 1
