"""``netplugin host verify --guest`` with a scripted VM: what is kept, what fails how, and nothing is left.

A real VM is in tests/functional/test_verify_guest.py.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import uuid
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin.api.errors import CapacityExhausted, HostError, InvalidRequest, NetpluginError
from netplugin.cli.main import main
from netplugin.host.cpus import format_list
from netplugin.host.locks import Locks
from netplugin.libvirt.guest import read_domain
from netplugin.tuning.facts import DomainLive, Facts, Live
from netplugin.tuning.root import known
from netplugin.tuning.verifying import result, vm
from netplugin.tuning.verifying.comparison import FigureVerdict, compare
from netplugin.tuning.verifying.iperf import busy_s, on_loopback
from netplugin.tuning.verifying.options import free_cpu, measured_vcpus
from netplugin.tuning.verifying.plot import draw_plot
from netplugin.tuning.verifying.result import TCP_VARIANTS, Tcp, TcpSample, TcpSettings, TcpVariant
from netplugin.tuning.verifying.show import EMULATED, comparison_text
from netplugin.tuning.verifying.vm import MTU, machines_on
from tests.lab.processes import wait_for
from tests.unit.tuning.golden import facts_of, planned
from tests.unit.tuning.runs import HIGH, LOW, in_a_vm
from tests.unit.tuning.scripted_guest import CYCLICTEST, IPERF3, ScriptedGuest
from tests.unit.zeroloss.images import made_up_image

OPTIONS = "--emulate --rounds 2 --duration 2"


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedGuest:
    # A lock of its own: the same tests may run twice on this machine.
    monkeypatch.setattr(vm, "_LOCK", f"verify-{uuid.uuid4()}")
    return ScriptedGuest(tmp_path / "host", monkeypatch)


def verify(guest: ScriptedGuest, options: str = OPTIONS, image: Path | None = None) -> int:
    words = [
        "host",
        "verify",
        "--guest",
        str(image or guest.image.folder),
        "--results",
        str(guest.home / "r"),
    ]
    try:
        return main([*words, *shlex.split(options)])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_a_run_in_a_vm_is_kept_with_what_the_vm_is(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(guest) == 0
    shown = capsys.readouterr()
    assert "In a VM (Debian bookworm, Linux 6.1.0-rt, 2 vCPUs, 1024 MB; not placed)" in shown.out
    assert EMULATED in shown.out and "vCPU" in shown.out
    assert [line.partition(",")[0] for line in shown.err.splitlines()][2:] == ["in the VM"] * 2
    assert guest.called == ["systemctl", "which", "uname", *["cyclictest", "cat"] * 2]
    [kept] = (guest.home / "r").iterdir()
    found = result.read(kept)
    assert found.latency is None and found.guest and found.guest.latency
    latency = found.guest.latency
    assert len(latency.rounds) == 2
    # The isolated vCPU is measured, and cyclictest's own thread runs on the other.
    assert latency.settings.cpus == "1"
    assert "--affinity=1 --threads=1 --mainaffinity=0" in (guest.home / "state/called").read_text()
    assert latency.overall.overflows == 2 and latency.overall.max_us == 3000
    assert found.conditions["guest vCPUs"] == "not placed"
    assert found.conditions["guest kernel"] == "6.1.0-rt" and "kernel" in found.conditions
    assert guest.left() == [] and guest.image.disk.read_text() == "the disk.qcow2\n"


def test_what_a_killed_run_left_is_removed_first(guest: ScriptedGuest) -> None:
    guest.was_killed(guest.image)
    assert verify(guest) == 0
    assert (guest.home / "state/destroyed").exists() and guest.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_nothing(guest: ScriptedGuest, number: signal.Signals) -> None:
    guest.script("hangs")
    words = ["--guest", str(guest.image.folder), "--results", str(guest.home / "r"), *shlex.split(OPTIONS)]
    code = (
        "import sys; from netplugin.tuning.verifying import vm; vm._LOCK = sys.argv.pop(1); "
        "from netplugin.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    netplugin = [sys.executable, "-c", code, vm._LOCK, "host", "verify", *words]
    # A shell in the background lets its children ignore SIGINT.
    run = subprocess.Popen(["env", "--default-signal=INT", *netplugin], stderr=subprocess.PIPE, text=True)
    try:
        wait_for((guest.home / "state/hanging").exists, 60, "cyclictest runs in the VM")
        run.send_signal(number)
        printed = run.communicate(timeout=60)[1]
    finally:
        run.kill()
        run.wait()
    assert run.returncode != 0 and "Traceback" not in printed, printed
    assert guest.left() == [] and list((guest.home / "r").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("refuse", "", "unable to map backing store"),
        ("silent", "--boot 1", "the VM does not answer by SSH"),
        ("dies-booting", "", "the VM ended while it booted"),
        ("dies", "", "the VM ended while cyclictest ran in it"),
        ("fails", "", "cyclictest in the VM: ?[31mcyclictest: no memory"),
        ("lacks", "", "the VM has no cyclictest"),
        ("floods", "", "cat in the VM prints more than 16 MB"),
    ],
)
def test_a_vm_that_fails_is_a_sentence_and_leaves_nothing(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str], script: str, options: str, words: str
) -> None:
    guest.script(script)
    assert verify(guest, f"{OPTIONS} {options}") == 1
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and shown.out == ""
    assert guest.left() == [] and list((guest.home / "r").iterdir()) == []


def other(**fields: object) -> str:
    """cyclictest's output with these fields of its thread."""
    return json.dumps(CYCLICTEST | {"thread": {"0": CYCLICTEST["thread"]["0"] | fields}})  # type: ignore[index]


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("\x1b[2Jno json", "cannot be made sense of"),
        ("", "cannot be made sense of"),
        ("[" * 100_000, "cannot be made sense of"),
        ("{}", "cannot be made sense of"),
        (other(cpu=0), "measured CPUs [0], not 1"),
        (other(histogram={"5": -90}), "fewer than no samples"),
        (other(histogram={}, cycles=0), "a CPU has no samples"),
        (other(min="soon"), "cannot be made sense of"),
        (other(max=10**400), "more than 64 bits"),
    ],
)
def test_garbage_that_a_vm_prints_is_refused(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str], printed: str, words: str
) -> None:
    guest.script("cyclictest.json", printed)
    assert verify(guest) == 1
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown and "\x1b" not in shown
    assert guest.left() == []


def test_an_image_that_was_written_is_reported(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    guest.script("writes-base", str(guest.image.disk))
    assert verify(guest) == 1
    assert "is no image any more" in capsys.readouterr().err


def test_one_run_at_a_time(guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]) -> None:
    locks = Locks()
    try:
        assert locks.take(vm._LOCK) is None
        assert verify(guest) == 1
    finally:
        locks.close()
    assert "measures in a VM now" in capsys.readouterr().err
    assert guest.left() == [] and guest.called == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--cpus 2", "cpus: 2 is no list of the VM's vCPUs, which are 0-1"),
        ("--cpus x", "cpus: x is no list of the VM's vCPUs"),
        ("--only throughput", "the testpmd loop is measured on the host"),
        ("--loop-cpus 0,1", "the testpmd loop is measured on the host"),
        ("--guest /nonexistent", "there is no image of the VM: No such file or directory. Fix: build one"),
    ],
)
def test_what_cannot_be_is_reported_before_a_vm_is_started(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert verify(guest, f"{OPTIONS} {options}") == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert guest.called == [] and not (guest.home / "state/netplugin-verify.xml").exists()


def test_an_image_without_the_program_is_refused(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    image = made_up_image(guest.home / "other", packages={"dpdk-dev": "22.11"})
    assert verify(guest, OPTIONS, image.folder) == 1
    assert "netplugin-zeroloss vm build --package rt-tests" in capsys.readouterr().err
    assert guest.called == []


# -- the VM, purely --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "cpus"),
    [
        ("isolcpus=managed_irq,domain,2-7 quiet", "2-7"),
        ("isolcpus=1", "1"),
        ("root=/dev/vda", "0-7"),
        ("isolcpus=", "0-7"),
        ("isolcpus=1-x", "0-7"),
        ("isolcpus=1 isolcpus=nohz,3", "1"),
    ],
)
def test_the_vcpus_that_the_kernel_isolates_are_measured(tmp_path: Path, arguments: str, cpus: str) -> None:
    image = made_up_image(tmp_path / "image", arguments=arguments)
    assert format_list(measured_vcpus(None, image.manifest)) == cpus


def test_all_vcpus_are_measured_if_none_is_isolated(tmp_path: Path) -> None:
    image = made_up_image(tmp_path / "image").manifest
    assert measured_vcpus(None, image) == frozenset(range(8))
    assert measured_vcpus("1,3", image) == {1, 3}
    with pytest.raises(InvalidRequest):
        measured_vcpus("", image)


@pytest.mark.parametrize("realtime", [False, True])
def test_a_plan_places_the_vm(tmp_path: Path, realtime: bool) -> None:
    image = made_up_image(tmp_path / "image")
    facts = facts_of("published")
    plan = planned("published", pmd_cores=2, vm_cores=8, vm_memory_mb=65536, realtime=realtime)
    with pytest.raises(NetpluginError, match=r"capacity_exhausted|conflict"):
        machines_on(image, [2222], False, plan, facts, Live())  # this machine has no hugepages yet
    roomy = with_pages(facts)
    [made] = machines_on(image, [2222], False, plan, roomy, Live())
    assert len(set(made.vm.pins.values())) == 8 and set(made.vm.pins.values()) <= plan.partition.vcpus
    there = read_domain(made.xml)
    assert there.name == "netplugin-verify" and "hostfwd=tcp:127.0.0.1:2222-:22" in made.xml
    assert ("vcpusched" in made.xml) is realtime is made.vm.realtime
    [bare] = machines_on(image, [2222], True, None, facts, Live())
    assert bare.vm.pins == {} and "vcpupin" not in bare.xml and 'type="qemu"' in bare.xml


def test_two_vms_have_cpus_of_their_own_and_a_link(tmp_path: Path) -> None:
    image = made_up_image(tmp_path / "image")
    facts = with_pages(facts_of("published"))
    plan = planned("published", pmd_cores=2, vm_cores=8, vm_memory_mb=65536)
    one, other = machines_on(image, [2222, 2223], False, plan, facts, Live())
    assert len({*one.vm.pins.values(), *other.vm.pins.values()}) == 16
    nics = [read_domain(each.xml).nics for each in (one, other)]
    assert [[(nic.mac, nic.address) for nic in each] for each in nics] == [
        [("52:54:00:5a:fe:01", "0000:00:11.0")],
        [("52:54:00:5a:fe:02", "0000:00:11.0")],
    ]
    assert all(f'<mtu size="{MTU}"/>' in each.xml and 'queues="8"' in each.xml for each in (one, other))
    assert other.ssh.port == 2223 and "/netplugin-verify-2.qcow2" in other.xml
    assert read_domain(machines_on(image, [2222], True, None, facts, Live())[0].xml).nics == ()


def with_pages(facts: Facts) -> Facts:
    pools = tuple(replace(pool, total=1 << 16, free=1 << 16) for pool in known(facts.memory.pools, ()))
    return replace(facts, memory=replace(facts.memory, pools=pools))


# -- figures of VMs --------------------------------------------------------------------------------


def test_figures_of_vms_are_compared_as_those_of_hosts() -> None:
    found = compare(in_a_vm("before", HIGH), in_a_vm("after", LOW))
    better = {row.before.name for row in found.of(FigureVerdict.BETTER)}
    assert "guest latency maximum" in better and not any(name.startswith("latency") for name in better)
    text = comparison_text(found)
    assert "6/6" in text and EMULATED not in text


def test_an_emulated_vm_is_not_compared_with_one_of_kvm() -> None:
    found = compare(in_a_vm("before", HIGH, emulated=True), in_a_vm("after", LOW))
    assert {row.finding for row in found.rows} == {FigureVerdict.UNDECIDED}
    assert "the VM's processor is emulated in one and KVM's in the other" in comparison_text(found)
    assert EMULATED in comparison_text(found)


def test_the_plot_has_a_panel_for_the_vm(tmp_path: Path) -> None:
    found = compare(in_a_vm("before", HIGH, emulated=True), in_a_vm("after", LOW, emulated=True))
    draw_plot(found, tmp_path / "p.svg")
    assert "in the VM (cyclictest, emulated: no measure)" in (tmp_path / "p.svg").read_text()


# -- TCP between two VMs ---------------------------------------------------------------------------


@pytest.fixture
def linked(guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch) -> ScriptedGuest:
    """Without the bridge, which takes root; it is in tests/functional/test_verify_guest.py."""
    monkeypatch.setattr("netplugin.tuning.verifying.vm.bridge", nullcontext)
    return guest


def test_tcp_is_measured_in_all_variants(linked: ScriptedGuest, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(linked, f"{OPTIONS} --tcp --window 1") == 0
    shown = capsys.readouterr().out
    assert "TCP (iperf 3.12, 4 streams, 2 times 1 s), medians" in shown
    for variant in ("MTU 1500, LSO", "MTU 1500, no LSO", "MTU 9000, LSO", "MTU 9000, no LSO", "this host"):
        assert variant in shown
    ran = (linked.home / "state/called").read_text()
    assert ran.count("iperf3 --client 192.0.2.2 --port 5201 --json --time 1 --omit 1 --parallel 4") == 8
    # The NICs of both VMs are set before each run, the first found by its MAC address.
    assert (
        ran.count("ethtool -K enp0s17 tso off gso off") == ran.count("ethtool -K ens17 tso off gso off") == 4
    )
    assert ran.count("ip link set dev ens17 mtu 9000 up") == 4
    [kept] = (linked.home / "r").iterdir()
    found = result.read(kept).guest
    assert found and (tcp := found.tcp)
    assert [len(each.samples) for each in tcp.between] == [2] * 4 and len(tcp.host) == 2
    assert {(each.mtu, each.lso): each.samples[0].bits_per_s for each in tcp.between} == dict.fromkeys(
        TCP_VARIANTS, 9.4e9
    )
    assert linked.left() == []


BAD_IPERF3 = [
    ("", "cannot be made sense of"),
    (json.dumps({"error": "unable to connect: \x1b[2J"}), "unable to connect"),
    (json.dumps(IPERF3 | {"end": {"streams": [{}], "sum_received": {"bits_per_second": 1}}}), "1 streams"),
    (json.dumps(IPERF3).replace("9400000000.0", "NaN"), "nan is out of range"),
    (json.dumps(IPERF3).replace("9400000000.0", "1" + "0" * 400), "more than 64 bits"),
    (json.dumps(IPERF3).replace("9400000000.0", "0"), "0.0 bits per second"),
    (json.dumps(IPERF3).replace("9400000000.0", '"fast"'), "could not convert"),
]


@pytest.mark.parametrize(("printed", "words"), BAD_IPERF3)
@pytest.mark.parametrize("where", ["iperf3", "iperf3-here"])
def test_garbage_of_iperf3_is_refused(
    linked: ScriptedGuest, capsys: pytest.CaptureFixture[str], printed: str, words: str, where: str
) -> None:
    if where == "iperf3":
        linked.script("iperf3.json", printed)
        assert verify(linked, f"{OPTIONS} --tcp --window 1") == 1
        shown = capsys.readouterr().err
        assert words in shown and "Traceback" not in shown and "\x1b" not in shown
        assert linked.left() == []
    else:
        linked.script("iperf3-here.json", printed)
        with pytest.raises(HostError, match=words):
            on_loopback(TcpSettings(streams=4, window_s=1), 5999)


@pytest.mark.parametrize(
    ("script", "text", "words"),
    [
        ("links.json", "[]", "the VM has no NIC 52:54:00:5a:fe:01"),
        ("links.json", "{", "what ip printed in the VM cannot be made sense of"),
        ("no-lso", "", "ethtool in the VM: Could not change any device features"),
    ],
)
def test_a_vm_that_cannot_do_tcp_is_a_sentence(
    linked: ScriptedGuest, capsys: pytest.CaptureFixture[str], script: str, text: str, words: str
) -> None:
    linked.script(script, text)
    assert verify(linked, f"{OPTIONS} --tcp") == 1
    assert words in capsys.readouterr().err and linked.left() == []


def test_tcp_needs_its_programs_in_the_image(
    linked: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    image = made_up_image(linked.home / "other", packages={"rt-tests": "2.4"})
    assert verify(linked, f"{OPTIONS} --tcp", image.folder) == 1
    assert "vm build --package iperf3" in capsys.readouterr().err and linked.called == []


def tcp_run(label: str, gbps: list[float], busy: float) -> result.MeasuredRun:
    samples = tuple(TcpSample(bits_per_s=each * 1e9, busy_cpus=busy) for each in gbps)
    tcp = Tcp(
        program="iperf 3.12",
        settings=TcpSettings(streams=4, window_s=2),
        between=(TcpVariant(mtu=1500, lso=True, samples=samples),),
        host=samples,
    )
    made = in_a_vm(label, LOW)
    assert made.guest
    return made.model_copy(update={"guest": made.guest.model_copy(update={"latency": None, "tcp": tcp})})


def test_rate_and_cost_of_tcp_are_compared() -> None:
    found = compare(
        tcp_run("a", [8, 8.1, 8.2, 7.9, 8.3, 7.8], 2.0), tcp_run("b", [9, 9.1, 9.2, 9.3, 9.4, 8.9], 2.1)
    )
    assert {row.before.name for row in found.of(FigureVerdict.BETTER)} == {
        "TCP between VMs, MTU 1500, LSO",
        "TCP between VMs, MTU 1500, LSO, CPU",
        "TCP on the host",
        "TCP on the host, CPU",
    }
    text = comparison_text(found)
    assert "TCP between VMs, MTU 1500, LSO (Gbit/s)" in text and "(CPUs per Gbit/s)" in text


def test_busy_cpus_are_counted_without_idle_and_steal(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 10 1 5 1000 50 2 2 70 3 0\ncpu0 1\n")
    before = busy_s(stat)
    assert before > 0
    stat.write_text("cpu 10 1 5 9000 90 2 2 99 3 0\n")
    assert busy_s(stat) == before
    stat.write_text("cpu 9999 1 5 9000 90 2 2 99 3 0\n")
    assert busy_s(stat) > before


# -- frames between testpmd here and in the VM -----------------------------------------------------


def test_frames_are_measured_in_a_boot_of_their_own(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(guest, f"{OPTIONS} --testpmd --window 1") == 0
    assert "bytes, " in capsys.readouterr().out
    [kept] = (guest.home / "r").iterdir()
    run = result.read(kept)
    assert run.guest and (found := run.guest.throughput)
    assert len(found.samples) == 2 and min(found.samples) > 0
    assert found.settings.guest_cpu == 1 and found.program == "DPDK 22.11"
    called = (guest.home / "state/called").read_text()
    start = "systemd-run --quiet --collect --unit=netplugin-testpmd dpdk-testpmd --lcores 0@0,1@1 --in-memory"
    assert (
        called.count(f"{start} -a 0000:01:00.0 --") == called.count("systemctl stop netplugin-testpmd") == 2
    )
    # The VM of the latency is another one, without a program that polls next to it.
    assert called.index("cyclictest") > called.rindex("systemctl stop")
    assert "vhostuser" not in (guest.home / "state/netplugin-verify.xml").read_text()
    assert guest.left() == []


def test_no_frames_is_an_error_with_the_output_of_testpmd(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    guest.script("no-frames")
    assert verify(guest, f"{OPTIONS} --testpmd") == 1
    shown = capsys.readouterr().err
    assert "no frame comes from testpmd in the VM:\nEAL: no free hugepages?[2J" in shown
    assert guest.left() == [] and "cyclictest" not in guest.called


def test_the_nic_of_testpmd_has_shared_memory_and_a_fixed_address(tmp_path: Path) -> None:
    image = made_up_image(tmp_path / "image")
    facts = with_pages(facts_of("published"))
    for plan in (None, planned("published", pmd_cores=2, vm_cores=8, vm_memory_mb=65536)):
        [made] = machines_on(image, [2222], False, plan, facts, Live(), Path("/run/x/loop.sock"))
        [nic] = read_domain(made.xml).nics
        assert nic.address == "0000:01:00.0" and 'mode="client"' in made.xml
        assert '<access mode="shared"/>' in made.xml and "vectors" not in made.xml
        cpu = free_cpu(frozenset(made.vm.pins.values()), plan, facts, Live())
        assert cpu not in made.vm.pins.values()
        if plan:
            assert cpu in plan.partition.pmd
    with pytest.raises(CapacityExhausted, match="no CPU is left"):
        free_cpu(frozenset(), None, facts, Live(domains=(busy_domain(facts),)))


def busy_domain(facts: Facts) -> DomainLive:
    every = known(facts.cpus.online, frozenset())
    return DomainLive("vm", tuple(frozenset({cpu}) for cpu in every), frozenset({0}), frozenset())
