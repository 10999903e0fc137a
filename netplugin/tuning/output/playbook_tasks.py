"""Tasks of a host's playbook: kernel command line, other_config of OVS, kernel threads, VFs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from netplugin.tuning.read.network import PCI
from netplugin.tuning.steps import KernelArgument, Step

# -- Builders for common Ansible tasks. -----------------------------------------------------------


Task: TypeAlias = dict[str, Any]


class Template(str):
    """Text that Ansible evaluates: a condition, or ``{{ }}`` in a value. All other text is data.

    It holds names of variables, constants and numbers only; what was read reaches it as a variable.
    """


def command(name: str, *words: str) -> Task:
    return {
        "name": name,
        "ansible.builtin.command": {"argv": list(words)},
        "changed_when": True,
    }


def file_with(name: str, path: str, lines: list[str]) -> Task:
    """Write a whole file that netplugin owns."""
    return {
        "name": name,
        "ansible.builtin.copy": {
            "dest": path,
            "content": "# Made by netplugin.\n" + "".join(f"{line}\n" for line in lines),
            "mode": "0644",
        },
    }


def notified(task: Task, handler: str) -> Task:
    return task | {"notify": handler}


# -- Tasks that set the kernel command line: a grub.d file on Debian, grubby on Red Hat. ----------


UPDATE_GRUB = "Update grub"
_GRUB = "/etc/default/grub"
_DEBIAN = Template("ansible_facts.os_family == 'Debian' and netplugin_grub.stat.exists")
#: Arguments that grubby reports for the next boot.
_BOOTED = r"""netplugin_grubby.stdout | regex_findall('[^\s"]+')"""
_NAMES = "netplugin_names | map('regex_escape') | join('|')"
_ANY_OF_THEM = f"{{{{ {_NAMES} }}}}"
_RED_HAT = Template("ansible_facts.os_family == 'RedHat'")


def kernel_tasks(steps: tuple[Step, ...]) -> Iterator[Task]:
    found = [(s.target.name, s.desired) for s in steps if isinstance(s.target, KernelArgument)]
    if not found:
        return
    words = [f"{name}={desired}" for name, desired in found if desired is not None]
    gone = [name for name, desired in found if desired is None]
    yield {
        "name": "Look for the settings of grub",
        "ansible.builtin.stat": {"path": _GRUB},
        "register": "netplugin_grub",
    }
    yield from _debian([name for name, _ in found], words)
    yield from _red_hat(words, gone)
    left = ["Remove from the kernel's command line:", *gone] if gone else []
    yield {
        "name": "Report what no known boot loader was given",
        "ansible.builtin.debug": {"msg": ["Add to the kernel's command line:", *words, *left]},
        "when": Template(f"not ({_RED_HAT} or netplugin_grub.stat.exists)"),
    }


def _debian(names: list[str], words: list[str]) -> Iterator[Task]:
    # With two isolcpus or hugepages arguments the kernel does not use the last one: it warns or adds them up.
    yield {
        "name": "Take older values out of grub's own file",
        "ansible.builtin.replace": {
            "path": _GRUB,
            "regexp": Template(rf"""(?<=[\s"'])(?:{_ANY_OF_THEM})=[^\s"']*[ ]?"""),
            "replace": "",
        },
        "vars": {"netplugin_names": names},
        "when": _DEBIAN,
        "notify": UPDATE_GRUB,
    }
    lines = [f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {word}"' for word in words]
    yield notified(
        file_with("Set the kernel's arguments", "/etc/default/grub.d/netplugin-tuning.cfg", lines),
        UPDATE_GRUB,
    ) | {"when": _DEBIAN}


def _red_hat(words: list[str], gone: list[str]) -> Iterator[Task]:
    yield {
        "name": "Read the kernel's arguments of the next boot",
        "ansible.builtin.command": {"argv": ["grubby", "--info=DEFAULT"]},
        "register": "netplugin_grubby",
        "changed_when": False,
        "check_mode": False,
        "when": _RED_HAT,
    }
    if gone:
        yield command(
            "Remove kernel arguments with grubby",
            "grubby",
            "--update-kernel=ALL",
            Template("--remove-args={{ netplugin_names | join(' ') }}"),
        ) | {
            "vars": {"netplugin_names": gone},
            "when": [
                _RED_HAT,
                Template(f"{_BOOTED} | select('match', '(' ~ ({_NAMES}) ~ ')=') | list | length > 0"),
            ],
        }
    yield command(
        "Set the kernel's arguments with grubby",
        "grubby",
        "--update-kernel=ALL",
        Template("--args={{ netplugin_arguments | join(' ') }}"),
    ) | {
        "vars": {"netplugin_arguments": words},
        "when": [_RED_HAT, Template(f"netplugin_arguments | difference({_BOOTED}) | length > 0")],
    }


# -- Tasks that set ``other_config`` of OVS where it differs. -------------------------------------


#: Pairs of other_config in OVSDB's JSON encoding of a map (RFC 7047).
_FOUND_SETTINGS = "(netplugin_ovs.stdout | from_json).data[0][0][1]"


def ovs_tasks(settings: list[tuple[str, str | None]]) -> Iterator[Task]:
    """``settings`` are keys and values; None removes the key. ``--no-wait``, because vswitchd may be down or
    waiting for memory."""
    if not settings:
        return
    yield {
        "name": "Read other_config of OVS",
        "ansible.builtin.command": {
            "argv": [
                "ovs-vsctl",
                "--no-wait",
                "--format=json",
                "--columns=other_config",
                "list",
                "Open_vSwitch",
            ],
        },
        "register": "netplugin_ovs",
        "changed_when": False,
        "check_mode": False,
    }
    yield {
        "name": "Set other_config of OVS",
        "ansible.builtin.command": {
            "argv": [
                "ovs-vsctl",
                "--no-wait",
                "set",
                "Open_vSwitch",
                ".",
                Template("other_config:{{ item.key }}={{ item.value }}"),
            ],
        },
        "loop": [{"key": key, "value": value} for key, value in settings if value is not None],
        "when": Template(f"[item.key, item.value] not in {_FOUND_SETTINGS}"),
        "changed_when": True,
    }
    gone = [key for key, value in settings if value is None]
    if gone:
        yield {
            "name": "Remove from other_config of OVS",
            "ansible.builtin.command": {
                "argv": [
                    "ovs-vsctl",
                    "--no-wait",
                    "remove",
                    "Open_vSwitch",
                    ".",
                    "other_config",
                    Template("{{ item }}"),
                ],
            },
            "loop": gone,
            "when": Template(f"item in ({_FOUND_SETTINGS} | map('first'))"),
            "changed_when": True,
        }


# -- Tasks that give kernel threads a real-time priority where it differs. ------------------------


def thread_tasks(threads: str, priority: str) -> Iterator[Task]:
    """``threads`` is the name without CPU number: ``ksoftirqd``."""
    register = f"netplugin_{threads}"
    yield {
        "name": f"Read the priorities of {threads}",
        # Any process may have the name of a kernel thread, but only kernel threads are kthreadd's children.
        "ansible.builtin.command": {"argv": ["ps", "--ppid", "2", "-o", "pid=,cls=,rtprio=,comm="]},
        "register": register,
        "changed_when": False,
        "check_mode": False,
    }
    pattern = rf"^\s*\d+\s+(?!FF\s+{priority}\s)\S+\s+\S+\s+{threads}/"
    task = command(
        f"Set the priorities of {threads}",
        "chrt",
        "--fifo",
        "--pid",
        priority,
        Template("{{ (item | split)[0] }}"),
    )
    loop = f"{{{{ {register}.stdout_lines | select('match', netplugin_pattern) | list }}}}"
    yield task | {"vars": {"netplugin_pattern": pattern}, "loop": Template(loop)}


# -- Tasks that create VFs on PFs that have none, now and at each boot. ---------------------------


#: A udev rule, because at boot the time at which the NIC's driver loads is not known.
_RULES = "/etc/udev/rules.d/90-netplugin-tuning.rules"


def vf_tasks(counts: list[tuple[str, str]]) -> Iterator[Task]:
    """``counts`` are PCI addresses and numbers. Existing VFs in another number must be removed first."""
    if not counts:
        return
    nics = [{"path": f"{PCI}/{address}/sriov_numvfs", "number": n} for address, n in counts]
    yield {
        "name": "Read how many virtual functions there are",
        "ansible.builtin.slurp": {"src": Template("{{ item.path }}")},
        "loop": nics,
        "register": "netplugin_vfs",
    }
    there = "item.content | b64decode | trim"
    yield {
        "name": "Stop where there are virtual functions in another number, which may be in use",
        "ansible.builtin.assert": {
            "that": [Template(f"{there} in ['0', item.item.number]")],
            "fail_msg": Template("Write 0 to {{ item.item.path }} once nobody uses them"),
        },
        "loop": Template("{{ netplugin_vfs.results }}"),
    }
    yield {
        "name": "Enable virtual functions",
        "ansible.builtin.command": {
            "argv": ["tee", Template("{{ item.item.path }}")],
            "stdin": Template("{{ item.item.number }}"),
        },
        "loop": Template("{{ netplugin_vfs.results }}"),
        "when": Template(f"{there} != item.item.number"),
        "changed_when": True,
    }
    rules = [
        f'ACTION=="add", SUBSYSTEM=="net", KERNELS=="{address}", ATTR{{device/sriov_numvfs}}="{n}"'
        for address, n in counts
    ]
    yield file_with("Enable virtual functions at boot", _RULES, rules)
