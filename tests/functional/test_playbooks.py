"""Playbooks by Ansible's own programs: linted, played in check mode on this machine, and for real in part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from netplugin.host.cpus import parse_list, to_kernel
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.guest.playbook import guest_playbook
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.output.playbook import as_yaml, playbook
from netplugin.tuning.output.playbook_tasks import (
    Template,
    command,
    file_with,
    kernel_tasks,
    ovs_tasks,
    thread_tasks,
    vf_tasks,
)
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.cpus import IRQBALANCE
from netplugin.tuning.read_live import read_ovs
from netplugin.tuning.root import Root
from netplugin.tuning.steps import (
    BannedCpus,
    Effect,
    File,
    Group,
    KernelArgument,
    OtherConfig,
    Step,
    Sysctl,
    needed,
)
from tests.lab.ansible import lint, play
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import CommandError, run
from tests.unit.tuning.golden import PLANS, facts_of, plan_of
from tests.unit.tuning.guests import guest_plan_of

#: Where a playbook writes; all of /etc is private while it is played.
WRITTEN = (
    Path("/etc/tmpfiles.d/netplugin-tuning.conf"),
    Path("/etc/sysctl.d/90-netplugin-tuning.conf"),
    Path("/etc/default/grub.d/netplugin-tuning.cfg"),
    Path("/run/tmpfiles.d/netplugin-tuning.conf"),
    Path("/etc/modprobe.d/netplugin-tuning.conf"),
)
#: Between them they have every task that there is.
LINTED = ("published-realtime", "amd-nps4", "intel-snc")
LINTED_GUESTS = ("router", "realtime")
LINUX = "GRUB_CMDLINE_LINUX"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"


@pytest.fixture(scope="module")
def private_etc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A copy of /etc, which is gone in the end, and nothing in /boot and from the firmware."""
    copy = tmp_path_factory.mktemp("private") / "etc"
    shutil.copytree("/etc", copy, symlinks=True)
    empty = ("/boot", "/sys/firmware")
    run(["mount", "--no-mtab", "--bind", copy, "/etc"])
    for place in empty:
        run(["mount", "--no-mtab", "-t", "tmpfs", "tmpfs", place])
    try:
        yield
    finally:
        for place in (*empty, "/etc"):
            run(["umount", "--no-mtab", place])


def this_machine(ovs: PrivateOvs) -> tuple[Facts, Live]:
    return read_facts(Root()), Live(ovs=read_ovs(ovs.sockets))


def written(plan: TuningPlan, facts: Facts, path: Path) -> Path:
    path.write_text(playbook(plan, needed(facts.cpus.online)))
    return path


@pytest.mark.long
def test_the_strictest_profile_of_the_linter_has_nothing_to_say(ovs: PrivateOvs, tmp_path: Path) -> None:
    facts, live = this_machine(ovs)
    here = make_plan(facts, HostIntent(pmd_cores=1, realtime=True), live)
    playbooks = [written(here, facts, tmp_path / "here.yml")]
    for name in LINTED:
        facts = facts_of(PLANS[name][0])
        playbooks.append(written(plan_of(name), facts, tmp_path / f"{name}.yml"))
    for name in LINTED_GUESTS:
        playbooks.append(tmp_path / f"{name}.yml")
        playbooks[-1].write_text(guest_playbook(guest_plan_of(name)))
    lint(tmp_path, *playbooks)


@pytest.mark.usefixtures("private_etc")
def test_check_mode_says_what_it_would_change_and_changes_nothing(ovs: PrivateOvs, tmp_path: Path) -> None:
    facts, live = this_machine(ovs)
    plan = make_plan(facts, HostIntent(pmd_cores=1, realtime=True), live)
    played = play(tmp_path, written(plan, facts, tmp_path / "tune.yml"), check=True, env=ovs.env)
    assert {"Set hugepages and masks, now and at boot", "Set sysctls"} <= played.changes
    assert not any(path.exists() for path in WRITTEN)
    assert this_machine(ovs)[1] == live
    after = make_plan(this_machine(ovs)[0], HostIntent(pmd_cores=1, realtime=True), live)
    assert after.steps == plan.steps


@pytest.mark.usefixtures("private_etc")
def test_a_machine_that_it_was_not_made_for_is_refused(ovs: PrivateOvs, tmp_path: Path) -> None:
    book = written(plan_of("published-pmd-2"), facts_of("published"), tmp_path / "tune.yml")
    with pytest.raises(Exception, match="This plan is for a machine with CPUs 0-63"):
        play(tmp_path, book, check=True, env=ovs.env)
    facts, live = this_machine(ovs)
    plan = make_plan(facts, HostIntent(pmd_cores=1), live)
    first, *others = plan.partition.nodes
    other = replace(plan.partition, nodes=(replace(first, node=7), *others))
    book = written(replace(plan, partition=other), facts, tmp_path / "nodes.yml")
    with pytest.raises(Exception, match=r"This plan is for a machine with .*/node7 "):
        play(tmp_path, book, check=True, env=ovs.env)


def harmless(step: Step) -> Step | None:
    """The steps that this machine may take for real: of its files one, with the value that it has."""
    match step.target:
        case File(path) if path == THP and isinstance(step.now, str):
            return replace(step, desired=step.now)
        case Sysctl("vm.stat_interval") | KernelArgument() | OtherConfig("pmd-cpu-mask") | BannedCpus():
            return step
    return None


@dataclass(frozen=True)
class Grub:
    """The settings of grub, older values among them, and a program that is called to read them."""

    file: Path
    programs: Path

    @property
    def calls(self) -> int:
        called = self.programs / "called"
        return len(called.read_text().split()) if called.exists() else 0


@pytest.fixture
def grub(private_etc: None, tmp_path: Path) -> Iterator[Grub]:
    made = Grub(Path("/etc/default/grub"), tmp_path / "bin")
    _files(
        {
            "/boot/grub/grub.cfg": "linux /vmlinuz ro\n",
            "/etc/default/grub": 'GRUB_CMDLINE_LINUX_DEFAULT="quiet isolcpus=3 nohz-full=\\"3\\" "\n'
            "GRUB_CMDLINE_LINUX='hugepages=4 mce=off mce=no_cmci'\n",
            "/etc/default/grub.d/50-cloud.cfg": f'{LINUX}="${LINUX} iommu=off isolcpus=5"\n',
        }
    )
    (made.file.parent / "grub.d" / "netplugin-tuning.cfg").unlink(missing_ok=True)
    made.programs.mkdir()
    for name in ("update-grub", "proxmox-boot-tool"):
        _program(made, name, f"echo {name} >> {made.programs}/called")
    yield made
    for folder in ("/boot/grub", "/boot/loader", "/sys/firmware/efi"):
        shutil.rmtree(folder, ignore_errors=True)


def _files(texts: dict[str, str | bytes]) -> None:
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def irqbalance(grub: Grub) -> Path:
    """Its environment file, and programs in the place of its own and of systemctl."""
    _program(grub, "irqbalance", "echo irqbalance version 1.9.2; exit 1")
    _program(grub, "systemctl", "exit 0")
    file = Path(IRQBALANCE[0])
    file.write_text("# irqbalance\n")
    return file


def _program(grub: Grub, name: str, script: str) -> None:
    program = grub.programs / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_for_real_it_does_what_it_says_and_nothing_the_second_time(
    ovs: PrivateOvs, tmp_path: Path, grub: Grub, irqbalance: Path
) -> None:
    interval = Path("/proc/sys/vm/stat_interval")
    before = interval.read_text()
    intent = HostIntent(pmd_cores=1, realtime=True)
    ovs.set_other_config({"pmd-cpu-mask": "0x1"})
    try:
        facts, live = this_machine(ovs)
        plan = make_plan(facts, intent, live)
        steps = tuple(filter(None, map(harmless, plan.steps)))
        book = written(replace(plan, steps=steps), facts, tmp_path / "tune.yml")
        env = {**ovs.env, "PATH": f"{grub.programs}:{os.environ['PATH']}"}
        first = play(tmp_path, book, env=env)
        expected = {
            "Set hugepages and masks, now and at boot",
            "Set sysctls",
            "Set other_config of OVS",
        }
        expected |= {"Tell irqbalance which CPUs to leave alone", "Restart irqbalance"}
        assert expected | {"Set the kernel's arguments", "Write kernel files"} <= first.changes

        after = make_plan(read_facts(Root()), intent, this_machine(ovs)[1])
        done = {step.target for step in after.steps if step.done}
        later = {step.target for step in steps if step.effect is Effect.REBOOT}
        left_out = {step.target for step in plan.steps if step.target == File(THP) and not step.done}
        assert {step.target for step in steps} - done == later | left_out
        assert interval.read_text().strip() == "10" != before.strip()
        assert ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask") == "0x2"
        _says(
            grub,
            [f"{s.target.name}={s.desired}" for s in steps if isinstance(s.target, KernelArgument)],
        )
        assert grub.calls == 1

        # A mask goes before the list: the same CPUs do, as an older tuned writes them, and others do not.
        banned = next(step for step in steps if isinstance(step.target, BannedCpus))
        mask = to_kernel(parse_list(str(banned.desired)))
        irqbalance.write_text(f"{irqbalance.read_text()}IRQBALANCE_BANNED_CPUS=00000000,{mask:0>8}\n")
        second = play(tmp_path, book, env=env)
        assert (second.changed, second.changes, grub.calls) == (0, set(), 1)
        irqbalance.write_text(f"{irqbalance.read_text()}IRQBALANCE_BANNED_CPUS=00000000\n")
        book = written(replace(plan, steps=(banned,)), facts, tmp_path / "irqbalance.yml")
        with pytest.raises(CommandError, match="goes before IRQBALANCE_BANNED_CPULIST"):
            play(tmp_path, book, env=env, check=True)
    finally:
        interval.write_text(before)
        ovs.set_other_config(ovs.other_config)


def _says(grub: Grub, desired: list[str]) -> None:
    """As grub-mkconfig reads them: the old values are gone, and each new one is there once."""
    assert _sourced(grub) == ["quiet", "mce=no_cmci", *" ".join(desired).split()]


def _sourced(grub: Grub) -> list[str]:
    files = [grub.file, *sorted((grub.file.parent / "grub.d").glob("*.cfg"))]
    script = 'for each; do . "$each"; done; echo "$GRUB_CMDLINE_LINUX_DEFAULT $GRUB_CMDLINE_LINUX"'
    return run(["sh", "-euc", script, "sh", *files]).split()


ENTRY = """title Debian
linux /vmlinuz
options root=/dev/sda1 "isolcpus=2 3" isolcpus=4 hugepages=4 default-hugepagesz=2M
options nohz-full="4" quiet mce=off rcu_nocbs=4 -- single
"""
OTHER = "title Memory test\nefi /memtest.efi\n"
STARTED = "/sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
SYSTEMD_BOOT = b"\6\0\0\0" + "systemd-boot 252.22\0".encode("utf-16-le")
ARGUMENTS = {
    **{"default_hugepagesz": "1G", "hugepagesz": "1G", "hugepages": "16 hugepagesz=2M hugepages=8"},
    **{"isolcpus": "domain,2-3", "nohz_full": "2-3", "rcu_nocbs": "2-3", "mce": "ignore_ce"},
}


def _arguments(tmp_path: Path, family: str = "Debian", **line: str) -> tuple[Path, str]:
    """A playbook that sets them alone on such a system with this command line, and what it sets."""
    steps = [
        Step(Group.KERNEL_ARGUMENTS, KernelArgument(name), None, value, Effect.REBOOT, "", "")
        for name, value in ARGUMENTS.items()
    ]
    book = tmp_path / "arguments.yml"
    system = {"ansible.builtin.set_fact": {"os_family": family, "proc_cmdline": line, "cacheable": True}}
    book.write_text(as_yaml("Set arguments", [system, *kernel_tasks(tuple(steps))]))
    return book, " ".join(f"{name}={value}" for name, value in ARGUMENTS.items())


@pytest.mark.parametrize("loader", ["systemd-boot", "proxmox", "grub-entries"])
def test_the_files_of_the_boot_loader_that_was_used_and_of_no_other(
    tmp_path: Path, grub: Grub, loader: str
) -> None:
    entries = Path("/boot/loader/entries")
    cmdline = Path("/etc/kernel/cmdline")
    long = "x" * 2000 if loader == "proxmox" else "quiet"
    _files({str(cmdline): f"# of kernel-install\nro isolcpus=4 {long}\n"})
    if loader != "proxmox":  # whose entries are on partitions that are not mounted
        _files({f"{entries}/debian.conf": ENTRY, f"{entries}/memory.conf": OTHER})
    environment = tmp_path / "grubenv"
    if loader == "grub-entries":
        _files({"/boot/grub/grub.cfg": "insmod blscfg\nblscfg\n"})
        _files({f"{entries}/red-hat.conf": "linux /vmlinuz\noptions $kernelopts $tuned_params\n"})
        _files({str(environment): "saved_entry=1\nkernelopts=root=/dev/sda1 isolcpus=5 ro\n"})
        script = f'if test "$2" = list; then cat {environment}; else echo "$3" > {environment}; fi'
        _program(grub, "grub2-editenv", script)
    else:
        _files({STARTED: SYSTEMD_BOOT})
    if loader == "proxmox":
        _files({"/etc/kernel/proxmox-boot-uuids": "1FDB-C48E\n"})
    scripts = {path: path.read_text() for path in (grub.file, grub.file.parent / "grub.d" / "50-cloud.cfg")}
    book, desired = _arguments(tmp_path)
    env = {"PATH": f"{grub.programs}:{os.environ['PATH']}"}
    try:
        played = play(tmp_path, book, env=env)
        assert cmdline.read_text() == f"# of kernel-install\nro {long} {desired}\n"
        assert (f"The kernel keeps 2047 bytes of {cmdline}" in played.reported) is (loader == "proxmox")
        if loader != "proxmox":
            assert (entries / "memory.conf").read_text() == OTHER
            assert (entries / "debian.conf").read_text().splitlines()[2:] == [
                "options root=/dev/sda1",
                f"options quiet {desired} -- single",
            ]
        if loader == "grub-entries":
            assert environment.read_text() == "kernelopts=root=/dev/sda1 ro\n"
            assert (entries / "red-hat.conf").read_text().endswith(f" $kernelopts $tuned_params {desired}\n")
            assert _sourced(grub) == ["quiet", "mce=no_cmci", *desired.split(), "iommu=off"]
        else:
            assert all(path.read_text() == text for path, text in scripts.items())
        updated = "Update the boot loader" in played.changes
        assert (updated, grub.calls) == ((True, 1) if loader == "proxmox" else (False, 0))
        assert play(tmp_path, book, env=env).changed == 0
    finally:
        shutil.rmtree("/etc/kernel")


def test_grub_whose_scripts_read_one_file(tmp_path: Path, grub: Grub) -> None:
    """As SUSE has it: the line is in that file, and once."""
    _program(
        grub,
        "grub2-mkconfig",
        f'test "$*" = "-o /boot/grub2/grub.cfg" && echo grub2 >> {grub.programs}/called',
    )
    _files({"/boot/grub2/grub.cfg": "linux /vmlinuz ro\n", "/boot/efi/EFI/other/grub.cfg": "blscfg\n"})
    _files({STARTED: b"\6\0\0\0" + "rEFInd 0.14.2".encode("utf-16-le")})
    book, desired = _arguments(tmp_path, "Suse", BOOT_IMAGE="/vmlinuz")  # it started grub
    env = {"PATH": f"{grub.programs}:{os.environ['PATH']}"}
    try:
        for calls in (1, 1):
            play(tmp_path, book, env=env)
            assert _sourced(grub) == ["quiet", "mce=no_cmci", *desired.split(), "iommu=off"]
            assert grub.calls == calls
    finally:
        shutil.rmtree("/boot/grub2")
        shutil.rmtree("/boot/efi")


@pytest.mark.parametrize("started", ["", "rEFInd 0.14.2", "Limine 8.6.0"])
def test_without_a_boot_loader_that_is_known_nothing_is_written(
    tmp_path: Path, grub: Grub, started: str
) -> None:
    if started:
        _files({STARTED: b"\6\0\0\0" + started.encode("utf-16-le")})
    else:
        Path("/boot/grub/grub.cfg").unlink()
    before = grub.file.read_text()
    book, desired = _arguments(tmp_path)
    played = play(tmp_path, book)
    assert played.changed == 0 and grub.file.read_text() == before
    assert desired in played.reported


def test_text_of_others_is_not_evaluated(tmp_path: Path) -> None:
    """Nor with --check, by the Ansible that evaluates the same text where it is marked as a template."""
    mark, control = tmp_path / "data", tmp_path / "template"
    hostile, template = (f"{{{{ lookup('pipe', 'touch {path}') }}}}" for path in (mark, control))
    tasks = [
        file_with(hostile, f"{tmp_path}/{hostile}", [hostile]),
        command(hostile, "true", hostile, Template(template)),
        *ovs_tasks([(hostile, hostile), (hostile, None)]),
        *vf_tasks([(hostile, hostile)]),
        *thread_tasks("ksoftirqd", hostile),
        *kernel_tasks((Step(Group.OVS, KernelArgument(hostile), None, hostile, Effect.REBOOT, "", ""),)),
    ]
    book = tmp_path / "hostile.yml"
    book.write_text(as_yaml(hostile, [task | {"ignore_errors": True} for task in tasks]))
    assert hostile in play(tmp_path, book, check=True).tasks
    assert control.exists() and not mark.exists()
