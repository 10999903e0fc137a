"""testpmd in a VM: what it is started with, what is read of it, how it ends, and what is said of a VM that
lacks something, lies or goes away.

ssh and testpmd are stand-ins: what is to run in the VM runs here, in a session of its own as there, and
testpmd answers from a file as DPDK's telemetry does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.loss.contract import AttributionError
from netplugin_zeroloss.machines import MachineError
from netplugin_zeroloss.vnf import choose
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    ForwardMode,
    TestpmdDescription,
    Vnf,
    VnfCores,
    VnfError,
    VnfPort,
)

from netplugin.programs.program import ProgramError
from tests.lab.processes import wait_for
from tests.unit.zeroloss.stand_ins import install

NICS = ("0000:01:00.0", "0000:02:00.0")
PORTS = tuple(
    VnfPort(Attachment.VHOST_USER, f"/run/{n}", f"52:54:00:00:0a:0{n}", f"52:54:00:00:0b:0{n}")
    for n in range(2)
)
#: Notes the directories that are made in the VM: of one that is gone nothing is removed any more.
_MKTEMP = """#!/bin/sh
PATH=${{PATH#*:}} mktemp "$@" | tee -a {0}/directories
"""
#: The VM's end is no child of this one's: only what is asked of the VM ends a program there.
_SSH = """#!/bin/sh
case "$*" in *HugePages*) exec cat {0}/facts ;; esac
while [ $# -gt 1 ]; do shift; done
exec 3<&0
setsid sh -c "$1" <&3 3<&- &
wait $!
"""
_TESTPMD = f"""#!{sys.executable} -ES
import json, os, signal, socket, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
open(folder + "/pid", "w").write(str(os.getpid()))
if os.path.exists(folder + "/refuses"):
    sys.exit("EAL: Cannot get hugepage information.")
place = os.environ["RUNTIME_DIRECTORY"] + "/dpdk/vnf"
os.makedirs(place)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(place + "/dpdk_telemetry.v2")
server.listen(1)
mode = [word.partition("=")[2] for word in sys.argv if word.startswith("--forward-mode=")][0]
if os.path.exists(folder + "/mode"):
    mode = open(folder + "/mode").read()
print(mode + " packet forwarding - ports=2 - cores=1 - streams=2", flush=True)
while True:
    there, _ = server.accept()
    answers = json.load(open(folder + "/answers"))
    if "ends" in answers:
        sys.exit(answers["ends"])
    there.send(json.dumps({{"version": "DPDK 22.11.11", "pid": os.getpid()}}).encode())
    while asked := there.recv(1000).decode():
        command, _, port = asked.partition(",")
        answer = answers[command]
        if isinstance(answer, list):
            answer = answer[int(port)]
        text = answer if isinstance(answer, str) else json.dumps({{command: answer}})
        there.send(text.encode())
"""


def _stats(received: Any, sent: Any, missed: Any = 0) -> dict[str, Any]:
    return {"ipackets": received, "opackets": sent, "imissed": missed, "ierrors": 0, "ibytes": 7}


class Vm:
    """A VM of two vCPUs whose plan isolates the second, as an image has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = {
            "program": "/usr/bin/dpdk-testpmd",
            "python": "/usr/bin/python3",
            "memory": "300",
            "pages": "200",
            "free": "400",
            "online": "0-1",
            "isolated": "1",
            "module": "",
            "iommu": "",
            "unsafe": "",
            NICS[0]: "uio_pci_generic",
            NICS[1]: "uio_pci_generic",
        }
        self.there = NICS
        self.answers(stats=[_stats(0, 0), _stats(0, 0)])
        self.tells()

    def tells(self, **facts: str) -> None:
        lines = [f"{name} {value}" for name, value in {**self.facts, **facts}.items()]
        lines += [f"there {nic}" for nic in self.there]
        (self.folder / "facts").write_text("\n".join(lines))

    def answers(self, stats: Any, status: str = "UP", queues: Any = 1) -> None:
        self.answers_with(
            {
                "/ethdev/info": {"nb_rx_queues": queues, "name": "0000:01:00.0"},
                "/ethdev/link_status": {"status": status, "speed": 4294967295},
                "/ethdev/stats": stats,
            }
        )

    def answers_with(self, answers: Mapping[str, Any]) -> None:
        draft = self.folder / "draft"
        draft.write_text(json.dumps(answers))
        draft.rename(self.folder / "answers")

    def vnf(self, cores: VnfCores | None = None, **fields: Any) -> Vnf:
        described = {
            "type": "testpmd",
            "binary": str(self.folder / "testpmd"),
            "machine": {"type": "ssh", "host": "10.0.0.9"},
            "nics": NICS,
            **fields,
        }
        return choose.make(TestpmdDescription.model_validate(described), PORTS, cores or VnfCores())

    @property
    def runs(self) -> bool:
        """Whether the testpmd that was started last runs."""
        try:
            os.kill(int((self.folder / "pid").read_text()), 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture
def vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vm]:
    stand_ins = {"ssh": _SSH.format(tmp_path), "mktemp": _MKTEMP.format(tmp_path), "testpmd": _TESTPMD}
    install(tmp_path, monkeypatch, **stand_ins)
    made = tmp_path / "directories"
    made.touch()
    yield Vm(tmp_path)
    for directory in made.read_text().split():
        shutil.rmtree(directory, ignore_errors=True)


def _word_after(command: str, option: str) -> str:
    words = command.split()
    return words[words.index(option) + 1]


def test_it_has_the_nics_and_the_cpus_of_the_vm(vm: Vm) -> None:
    with vm.vnf(memory_mb=300, forward_mode="macswap") as vnf:
        info = vnf.start()
        vnf.check()
        assert (info.name, info.version, info.rx_queues) == ("testpmd", "DPDK 22.11.11", (1, 1))
        command = info.configuration["command"]
        assert f"-a {NICS[0]} -a {NICS[1]} " in command and "--vdev" not in command
        assert _word_after(command, "--lcores") == "0@0,1@1", "the plan of the guest isolates CPU 1"
        assert f"--eth-peer=1,{PORTS[1].peer_mac}" in command and "--forward-mode=macswap" in command
        assert vm.runs
    assert not vm.runs, "ended in the VM, not only here"


@pytest.mark.parametrize(
    ("given", "isolated", "lcores"),
    [
        (VnfCores(0, (1, 2)), "1-3", "0@0,1@1,2@2"),
        (VnfCores(), "", "0@(0-3),1@(0-3)"),
        (VnfCores(), "0-3", "0@(0-3),1@0,2@1,3@2,4@3"),
        (VnfCores(3), "1-3", "0@3,1@1,2@2"),
    ],
)
def test_cpus_that_are_given_come_before_those_of_the_plan(
    vm: Vm, given: VnfCores, isolated: str, lcores: str
) -> None:
    vm.tells(online="0-3", isolated=isolated)
    with vm.vnf(given) as vnf:
        assert _word_after(vnf.start().configuration["command"], "--lcores") == lcores


def test_its_counters_attribute_loss_as_here(vm: Vm) -> None:
    with vm.vnf() as vnf:
        vnf.start()
        before = vnf.place.read()
        queues = {"q_ipackets": [90] + 15 * [0]}
        vm.answers(stats=[_stats(100, 85, missed=3), _stats(90, 98) | queues])
        found = vnf.place.between(before, vnf.place.read(), 1.0)
        lost = {name: count for name, count in found.lost.items() if count}
        assert lost == {"port0.rx_missed": 3, "port1.not_sent": 2, "port0.not_sent": 5}
        assert found.readings["port1.tx_packets"] == 98
        by_queue = {name: n for name, n in found.readings.items() if "rxq" in name}
        assert by_queue == {"port1.rxq0.packets": 90}, "the port has one queue, DPDK counts for 16"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"program": ""},
            r"no program .*testpmd(.|\n)*fix: .*without --no-testpmd.*apt-get install dpdk-dev",
        ),
        ({"python": ""}, r"no python3(.|\n)*fix: ssh root@10.0.0.9 apt-get install python3"),
        ({"pages": "0", "free": "0"}, r"no hugepages(.|\n)*fix: .*nr_hugepages"),
        ({"free": "100"}, r"100 MB of free hugepages, and testpmd needs 256 MB(.|\n)*fix: .*memory_mb"),
        (
            {"free": "100", NICS[0]: ""},
            r"free hugepages(.|\n)*NIC 0000:01:00.0 of the VM has the driver that",
        ),
        ({NICS[1]: "virtio-pci"}, r"0000:02:00.0 of the VM has the driver virtio-pci(.|\n)*fix: .*driverctl"),
        ({NICS[1]: "vfio-pci"}, r"no module vfio-pci"),
        ({NICS[1]: "vfio-pci", "module": "yes"}, r"no IOMMU, and vfio-pci takes no NIC"),
        ({"online": "0"}, r"CPU 1 of the VNF is not on line: the VM has 0"),
        ({"online": "all of them"}, r"the VM has no CPU that is known"),
    ],
)
def test_what_the_vm_lacks_is_reported_with_what_mends_it(vm: Vm, facts: dict[str, str], words: str) -> None:
    vm.tells(**facts)
    with vm.vnf() as vnf, pytest.raises(VnfError, match=words):
        vnf.start()
    assert not (vm.folder / "pid").exists(), "it was not started"


def test_a_nic_that_the_vm_has_not(vm: Vm) -> None:
    vm.there = NICS[:1]
    vm.tells()
    with vm.vnf() as vnf, pytest.raises(VnfError, match=r"no NIC at 0000:02:00\.0\n  fix: .* lspci -D"):
        vnf.start()


def test_a_driver_of_the_kernel_that_dpdk_shares_is_right(vm: Vm) -> None:
    vm.tells(**dict.fromkeys(NICS, "mlx5_core"))
    with vm.vnf() as vnf:
        vnf.start()


def test_memory_of_the_mode_noisy_counts(vm: Vm) -> None:
    with vm.vnf(forward_mode=ForwardMode.NOISY) as vnf, pytest.raises(VnfError, match="needs 1280 MB"):
        vnf.start()


@pytest.mark.parametrize("printed", ["", "Welcome!\n", "\x00\x7f\n" * 10, "program\x00\n"])
def test_a_vm_that_prints_something_else(vm: Vm, printed: str) -> None:
    (vm.folder / "facts").write_text(printed)
    with vm.vnf() as vnf, pytest.raises(MachineError, match="in place of what it has"):
        vnf.start()


def test_a_vm_that_greets_every_command(vm: Vm) -> None:
    """The name of the directory, which is removed at the end, cannot be taken from what it prints."""
    ssh = vm.folder / "ssh"
    ssh.write_text(ssh.read_text().replace("#!/bin/sh\n", "#!/bin/sh\necho 'Hello from .bashrc'\n"))
    with (
        vm.vnf() as vnf,
        pytest.raises(MachineError, match=r"in place of the name of a new directory(.|\n)*bashrc"),
    ):
        vnf.start()


_NO_COUNTERS = (
    None,
    [],
    {"ipackets": 1},
    _stats(-1, 0),
    _stats("17", 0),
    _stats(1.5, 0),
    _stats(True, 0),
    "no JSON",
    "[]",
    json.dumps({"/ethdev/xstats": _stats(1, 1)}),
)


def test_counters_that_are_none(vm: Vm) -> None:
    """Each is the end of the cell, and none is taken for a number of frames."""
    with vm.vnf() as vnf:
        vnf.start()
        for stats in _NO_COUNTERS:
            vm.answers(stats=[stats, stats])
            with pytest.raises(AttributionError, match="vnf: "):
                vnf.place.read()


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([_stats(5, 10), _stats(10, 10)], "port0.rx_packets went back by 5"),
        ([_stats(10, 10), _stats(10, 40)], "port 1 sent 30 frames that port 0 did not"),
    ],
)
def test_counters_that_cannot_be(vm: Vm, after: Any, words: str) -> None:
    vm.answers(stats=[_stats(10, 10), _stats(10, 10)])
    with vm.vnf() as vnf:
        vnf.start()
        before = vnf.place.read()
        vm.answers(stats=after)
        with pytest.raises(AttributionError, match=words):
            vnf.place.between(before, vnf.place.read(), 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "DOWN"}, "the link of /run/0 is up: not in time"),
        ({"queues": 2}, "/run/0 has 2 receive queues, not 1"),
        ({"queues": "1"}, "is no answer of DPDK to /ethdev/info"),
    ],
)
def test_ports_that_are_not_as_asked(vm: Vm, change: dict[str, Any], words: str) -> None:
    vm.answers(stats=[], **change)
    with vm.vnf(start_s=5) as vnf, pytest.raises(ProgramError, match=words):
        vnf.start()
    assert not vm.runs


def test_a_link_that_goes_down_ends_the_cell(vm: Vm) -> None:
    with vm.vnf() as vnf:
        vnf.start()
        vm.answers(stats=[], status="DOWN")
        with pytest.raises(VnfError, match="the link of /run/0 is down"):
            vnf.check()


def test_the_refusal_of_testpmd_is_reported_as_printed(vm: Vm) -> None:
    (vm.folder / "refuses").touch()
    with vm.vnf() as vnf, pytest.raises(ProgramError, match=r"ended with status 1(.|\n)*Cannot get hugepage"):
        vnf.start()


def test_a_testpmd_that_runs_in_another_mode_is_refused(vm: Vm) -> None:
    (vm.folder / "mode").write_text("io")
    with vm.vnf() as vnf, pytest.raises(VnfError, match=r"not in the mode mac(.|\n)*io packet forwarding"):
        vnf.start()


def test_a_connection_that_is_lost(vm: Vm) -> None:
    """255 is ssh's own status: testpmd may still be there, and the VM is looked at."""
    with vm.vnf() as vnf:
        vnf.start()
        vm.answers_with({"ends": 255})
        with pytest.raises(ProgramError):
            vnf.check()
        wait_for(lambda: not vm.runs, 20, "it has ended")

        def printed() -> str:
            with pytest.raises(ProgramError) as error:
                vnf.check()
            return str(error.value)

        wait_for(lambda: "the connection was lost" in printed(), 20, "ssh has ended too")


def test_a_vm_that_is_gone_is_left_in_time(vm: Vm) -> None:
    """Nothing there can be ended or removed any more, and nothing here stays."""
    with vm.vnf() as vnf:
        vnf.start()
        pid = int((vm.folder / "pid").read_text())
        ssh = vm.folder / "ssh"
        ssh.write_text("#!/bin/sh\necho 'No route to host' >&2\nexit 255\n")
        with pytest.raises(AttributionError, match="No route to host"):
            vnf.place.read()
    os.kill(pid, 9)  # of the stand-in, which no hang-up ends


def test_nics_are_those_of_a_vm(vm: Vm) -> None:
    for fields, words in (
        ({"nics": ()}, "testpmd in a VM: say in `nics`"),
        ({"nics": NICS[:1]}, "1 nics for 2 ports"),
        ({"machine": {"type": "local"}}, "nics are those of a VM"),
    ):
        with pytest.raises(VnfError, match=words):
            vm.vnf(**fields)


@pytest.mark.long
def test_a_testpmd_that_does_not_end_when_asked_is_killed_in_the_vm(vm: Vm) -> None:
    testpmd = vm.folder / "testpmd"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nfolder = "
    testpmd.write_text(testpmd.read_text().replace("folder = ", deaf, 1))
    with vm.vnf() as vnf:
        vnf.start()
    assert not vm.runs
