"""Render a plan's steps as an Ansible playbook of ansible.builtin modules.

The playbook writes persistent settings to its own files under /etc. It is idempotent, and neither
restarts OVS nor reboots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from netplugin.host.cpus import format_list, parse_list, to_kernel, to_mask
from netplugin.tuning import steps as kinds
from netplugin.tuning.facts import NODELESS
from netplugin.tuning.output.playbook_tasks import (
    Task,
    Template,
    command,
    file_with,
    folder,
    jinja,
    kernel_tasks,
    ovs_tasks,
    reading,
    slurp,
    stop,
    task,
    thread_tasks,
    update_loader,
    vf_tasks,
)
from netplugin.tuning.planning.partition import NodeShare, cpus_of
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.read.cpus import CPU, NODE
from netplugin.tuning.read.kernel import SYSTEMD, variables_path
from netplugin.tuning.read.memory import HUGEPAGES_UNIT
from netplugin.tuning.read.memory import LASTING as _LASTING
from netplugin.tuning.steps import Effect, Step

T = TypeVar("T")

#: Interrupt settings, which must not survive a reboot, because interrupt numbers change.
_PASSING = "/run/tmpfiles.d/netplugin-tuning.conf"
_SYSCTL = "/etc/sysctl.d/90-netplugin-tuning.conf"
_MODPROBE = "/etc/modprobe.d/netplugin-tuning.conf"
_PARAMETER = re.compile(r"/sys/module/(?P<module>\w+)/parameters/(?P<name>\w+)")
_FILES, _IRQS, _SYSCTLS = "Write kernel files", "Move interrupts", "Load sysctls"
_IRQBALANCE = "Restart irqbalance"
#: What begins a template of Jinja2; Ansible does not evaluate text without one of these.
_OPENINGS = ("{{", "{%", "{#")


def playbook(plan: TuningPlan, online: frozenset[int]) -> str:
    """Return YAML. The playbook refuses a host whose online CPUs, of all or of a node, are not the plan's."""
    # Tasks that may fail come before those that change: after a failure, notified handlers do not run.
    tasks = [
        *same_machine(online),
        *_same_nodes(plan.partition.nodes),
        *_heeds_bans(plan.steps),
        *_module_parameters(plan.steps),
        *step_tasks(plan.steps),
        *_rest(plan),
    ]
    handlers = [command(_IRQBALANCE, "systemctl", "try-restart", "irqbalance.service")]
    return as_yaml("Tune a host for packets, as netplugin planned it", tasks, handlers)


def step_tasks(steps: tuple[Step, ...]) -> Iterator[Task]:
    """In order of execution: memory before OVS, which needs it; settings that need a reboot last."""
    for make in (_files, _boot_pages, _sysctls, _swap, _threads, _irqbalance, _services, _tuned):
        yield from make(steps)
    yield from vf_tasks([(target.address, str(number)) for target, number in _of(kinds.VfCount, steps)])
    yield from ovs_tasks([(target.key, desired) for target, desired in _of(kinds.OtherConfig, steps)])
    yield from kernel_tasks(steps)


def _of(kind: type[T], steps: tuple[Step, ...]) -> Iterator[tuple[T, str | None]]:
    """The targets of one kind, and what they should be."""
    return ((step.target, step.desired) for step in steps if isinstance(step.target, kind))


def as_yaml(name: str, tasks: list[Task], handlers: Sequence[Task] = ()) -> str:
    """A playbook of these tasks with the handlers of ``step_tasks`` and additional ``handlers``.

    Text that is not a ``Template`` is data: where Ansible would evaluate it, it gets the tag ``!unsafe``.
    """
    import yaml  # slow to import

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Indents list entries too, as ansible-lint expects."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def scalar(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        data = not isinstance(text, Template) and any(opening in text for opening in _OPENINGS)
        return dumper.represent_scalar("!unsafe" if data else "tag:yaml.org,2002:str", text, style=style)

    Dumper.add_multi_representer(str, scalar)
    Dumper.add_representer(str, scalar)
    own = [
        command(_FILES, "systemd-tmpfiles", "--create", _LASTING),
        command(_IRQS, "systemd-tmpfiles", "--create", _PASSING),
        command(_SYSCTLS, "sysctl", f"--load={_SYSCTL}"),
        update_loader(),
    ]
    play = {"name": name, "hosts": "all", "become": True, "gather_facts": True, "tasks": tasks}
    plays = [play | {"handlers": [*own, *handlers]}]
    return str(yaml.dump(plays, Dumper=Dumper, sort_keys=False, width=120, explicit_start=True))


def same_machine(online: frozenset[int]) -> Iterator[Task]:
    yield slurp("Read which CPUs are on line", f"{CPU}/online", "netplugin_online")
    name, cpus = "Stop on a machine that the plan was not made for", format_list(online)
    same = f"netplugin_online.content | b64decode | trim == '{cpus}'"
    yield stop(name, same, f"This plan is for a machine with CPUs {cpus}")


def _same_nodes(shares: Sequence[NodeShare]) -> Iterator[Task]:
    """A kernel without NUMA has no files of nodes; nodes without CPUs do not count."""
    where = {"paths": [NODE], "patterns": ["node[0-9]*"], "file_type": "directory"}
    yield task("Look for NUMA nodes", "find", **where, register="netplugin_nodes")
    each = {"loop": jinja("netplugin_nodes.files"), "loop_control": {"label": jinja("item.path")}}
    path = jinja("item.path ~ '/cpulist'")
    yield slurp("Read which CPUs each NUMA node has", path, "netplugin_homes", **each)
    nodes = {s.node: cpus_of(core for core in s.cores if core.kind != NODELESS) for s in shares}
    planned = "; ".join(sorted(f"{NODE}/node{node} {format_list(cpus)}" for node, cpus in nodes.items()))
    texts = "netplugin_homes.results | map(attribute='content') | map('b64decode') | map('trim')"
    found = f"netplugin_homes.results | map(attribute='item.path') | zip({texts})"
    found += " | rejectattr(1, 'equalto', '') | map('join', ' ') | sort | join('; ')"
    name = "Stop on a machine whose NUMA nodes have other CPUs"
    fitting = [planned] if len(nodes) > 1 else [planned, ""]
    values = {"netplugin_found": jinja(found), "netplugin_planned": fitting}
    message = f"This plan is for a machine with {planned}"
    yield stop(name, "netplugin_found in netplugin_planned", message, vars=values)


def _files(steps: tuple[Step, ...]) -> Iterator[Task]:
    files = list(_of(kinds.File, steps))
    lasting = [f"w {target.path} - - - - {desired}" for target, desired in files if target.lasting]
    # The minus ignores errors: the kernel refuses to move managed interrupts.
    passing = [f"w- {target.path} - - - - {desired}" for target, desired in files if not target.lasting]
    if lasting:
        yield file_with("Set hugepages and masks, now and at boot", _LASTING, lasting) | {"notify": _FILES}
    if passing:
        yield from until_boot("Keep interrupts off isolated CPUs", passing)


def _module_parameters(steps: tuple[Step, ...]) -> Iterator[Task]:
    """systemd-tmpfiles misses modules that are loaded after it runs; modprobe.d(5) covers those."""
    lines = [
        f"options {match['module']} {match['name']}={desired}"
        for target, desired in _of(kinds.File, steps)
        if (match := _PARAMETER.fullmatch(target.path))
    ]
    if lines:
        yield file_with("Set parameters of modules, for when they are loaded", _MODPROBE, lines)
    else:
        name = "Remove the parameters of modules of an older plan"
        yield task(name, "file", path=_MODPROBE, state="absent")


def until_boot(name: str, lines: list[str], evaluated: bool = False) -> Iterator[Task]:
    """tmpfiles.d lines that do not survive a reboot."""
    yield folder("Make the folder of what lasts until a boot", str(PurePosixPath(_PASSING).parent))
    yield file_with(name, _PASSING, lines, evaluated) | {"notify": _IRQS}


def _sysctls(steps: tuple[Step, ...]) -> Iterator[Task]:
    lines = [f"{target.name} = {desired}" for target, desired in _of(kinds.Sysctl, steps)]
    if lines:
        yield file_with("Set sysctls", _SYSCTL, lines) | {"notify": _SYSCTLS}


def _swap(steps: tuple[Step, ...]) -> Iterator[Task]:
    if list(_of(kinds.Swap, steps)):
        when = Template("ansible_facts.swaptotal_mb > 0")
        yield command("Stop swapping", "swapoff", "--all") | {"when": when}
        areas = r"^([^#\n]\S*\s+\S+\s+swap\s.*)$"
        yield task("Swap no more after a boot", "replace", path="/etc/fstab", regexp=areas, replace=r"# \1")


def _tuned(steps: tuple[Step, ...]) -> Iterator[Task]:
    for variable, cpus in _of(kinds.TunedVariable, steps):
        line = {"regexp": rf"^{variable.name}\s*=", "line": f"{variable.name}={cpus}", "create": True}
        name, path = "Tell tuned which CPUs are isolated", variables_path(variable.profile)
        yield task(name, "lineinfile", path=path, **line, mode="0644")
    for _, profile in _of(kinds.TunedProfile, steps):
        active = ("netplugin_tuned", "tuned-adm", "active")
        yield reading("Read the profile of tuned", *active, failed_when=False)
        yield command("Choose the profile of tuned", "tuned-adm", "profile", str(profile)) | {
            "vars": {"netplugin_profile": profile},
            "when": Template("netplugin_profile not in netplugin_tuned.stdout"),
        }


def _irqbalance(steps: tuple[Step, ...]) -> Iterator[Task]:
    for target, cpus in _of(kinds.BannedCpus, steps):
        line = {"regexp": "^IRQBALANCE_BANNED_CPULIST=", "line": f"IRQBALANCE_BANNED_CPULIST={cpus}"}
        name = "Tell irqbalance which CPUs to leave alone"
        yield task(name, "lineinfile", path=target.path, **line, notify=_IRQBALANCE)


def _heeds_bans(steps: tuple[Step, ...]) -> Iterator[Task]:
    for target, cpus in _of(kinds.BannedCpus, steps):
        yield from _list_counts(target.path, parse_list(str(cpus)))


def _list_counts(path: str, desired: Sequence[int]) -> Iterator[Task]:
    """Stop if irqbalance would ignore the list: before 1.8, or if a different mask overrides it
    (``setup_banned_cpus`` in irqbalance's cputree.c). A mask of the same CPUs works with any version; tuned
    before 2.24 writes one."""
    version = ("netplugin_irqbalance", "irqbalance", "--version")
    yield reading("Read the version of irqbalance", *version, failed_when=False)
    yield slurp("Read which CPUs irqbalance leaves alone", path, "netplugin_banned")
    heeded = (
        f"(netplugin_mask | default('0', true) | int(base=16) == {int(to_mask(desired), 16)}) or "
        "(netplugin_mask == '' and netplugin_version is version('1.8', '>='))"
    )
    message = f"irqbalance is older than 1.8, or {path} has an IRQBALANCE_BANNED_CPUS that goes before "
    message += "IRQBALANCE_BANNED_CPULIST: update it and remove that line, or set that to "
    values = {
        "netplugin_version": jinja(
            "netplugin_irqbalance.stdout | default('') | regex_search('version ([0-9.]+)', '\\1') | "
            "default(['1.8'], true) | first"
        ),
        "netplugin_mask": jinja(
            "netplugin_banned.content | b64decode | "
            "regex_findall('^\\s*IRQBALANCE_BANNED_CPUS=(.*)$', multiline=True) | "
            "default([''], true) | last | regex_replace('[^0-9A-Fa-f]', '')"
        ),
    }
    name = "Stop where irqbalance would not heed the list"
    yield stop(name, heeded, f"{message}{to_kernel(desired)}", vars=values)


def _services(steps: tuple[Step, ...]) -> Iterator[Task]:
    for _, cpus in _of(kinds.ServiceCpus, steps):
        yield folder("Make the folder of systemd's settings", f"{SYSTEMD}.d")
        name, path = (
            "Keep services on housekeeping CPUs from the next boot",
            f"{SYSTEMD}.d/90-netplugin-tuning.conf",
        )
        # Lists accumulate; the empty one clears those of other files.
        yield file_with(name, path, ["[Manager]", "CPUAffinity=", f"CPUAffinity={cpus}"])


def _boot_pages(steps: tuple[Step, ...]) -> Iterator[Task]:
    """Unit that reserves hugepages before OVS starts: OVS's unit has no ordering after systemd-tmpfiles."""
    if not list(_of(kinds.BootPages, steps)):
        return
    unit = f"""\
[Unit]
Description=Hugepages of each NUMA node, as planned
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target ovs-vswitchd.service openvswitch.service libvirtd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=systemd-tmpfiles --create --prefix={NODE} {_LASTING}

[Install]
WantedBy=sysinit.target
"""
    path = f"/etc/systemd/system/{HUGEPAGES_UNIT}"
    yield file_with("Reserve hugepages at boot, before OVS starts", path, unit.splitlines())
    yield task("Enable it", "systemd", name=HUGEPAGES_UNIT, enabled=True, daemon_reload=True)


def _threads(steps: tuple[Step, ...]) -> Iterator[Task]:
    for target, priority in _of(kinds.ThreadPriority, steps):
        yield from thread_tasks(target.threads, str(priority))


def _rest(plan: TuningPlan) -> Iterator[Task]:
    waits = {
        Effect.OVS_RESTART: "other_config of OVS counts after a restart of ovs-vswitchd",
        Effect.REBOOT: "the kernel's arguments count after a reboot",
    }
    if left := [text for effect, text in waits.items() if plan.left(effect)]:
        yield task("Say what is left to do", "debug", msg="; ".join(left))
