"""Tasks of a host's playbook: kernel command line, other_config of OVS, kernel threads, VFs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from netplugin.tuning.command_line import KEPT, contradicting, spelling
from netplugin.tuning.read.kernel import LOADER_INFO, READS_ENTRIES
from netplugin.tuning.read.network import PCI
from netplugin.tuning.steps import KernelArgument, Step

# -- Builders for common Ansible tasks. -----------------------------------------------------------


Task: TypeAlias = dict[str, Any]


class Template(str):
    """Text that Ansible evaluates: a condition, or ``{{ }}`` in a value. All other text is data.

    It holds names of variables, constants and numbers only; what was read reaches it as a variable.
    """


def command(name: str, *words: str) -> Task:
    return {"name": name, "ansible.builtin.command": {"argv": list(words)}, "changed_when": True}


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


# -- Tasks that set the kernel command line, in the files of the boot loader that was used. -------


_GRUB, _CMDLINE = "/etc/default/grub", "/etc/kernel/cmdline"
_SNIPPET = f"{_GRUB}.d/netplugin-tuning.cfg"
#: proxmox-boot-tool writes entries from /etc/kernel/cmdline to partitions that it mounts for that.
_PROXMOX = "/etc/kernel/proxmox-boot-uuids"
_FOLDERS = (str(PurePosixPath(LOADER_INFO).parent), "/etc/default", "/etc/kernel", "/boot", "/efi/loader")
_FILES = (
    f"(?:{LOADER_INFO}",
    f"{_CMDLINE}|{_PROXMOX}|{_GRUB}",
    f"(?!{_SNIPPET}){_GRUB}[.]d/[^/]+[.]cfg",
    "/(?:boot|efi|boot/efi)/loader/entries/[^/]+[.]conf",
    "/boot/(?:.*/)?grub[.]cfg)$",
)
#: Those among them, by how their paths begin.
_SCRIPTS, _MENUS, _ENTRIES = _GRUB, "/boot/.*[.]cfg", ".*/entries/"
_UPDATE_LOADER = "Update the boot loader"
_FOUND = "(item.content | b64decode)"
#: grub's scripts on Debian read /etc/default/grub.d.
_DEBIAN = "ansible_facts.os_family == 'Debian' and netplugin_loader == 'grub'"
#: New arguments come at the end of an entry's last options and of a file's first line, before those of init.
_END = r"[^\n]*?)[ \t]*(?=[ \t]--(?:\s|\Z)|\n|\Z)"


def _read(pattern: str) -> str:
    return f"netplugin_read.results | selectattr('item.path', 'match', '{pattern}') | list"


#: grub's menu: /boot/grub2 goes before /boot/grub, and those before what is for the firmware.
_MENU = f"({_read(_MENUS)} | sort(attribute='item.path'))[-1:]"


def kernel_tasks(steps: tuple[Step, ...]) -> Iterator[Task]:
    found = {s.target.name: s.desired for s in steps if isinstance(s.target, KernelArgument)}
    if not found:
        return
    gone = [name for name, desired in found.items() if desired is None]
    left = ["Remove from the kernel's command line:", *gone] if gone else []
    exact = {name: value and contradicting(name, value) for name, value in found.items()}
    yield from _loader()
    yield {
        "name": "Name the kernel's arguments, and in any spelling what they replace",
        "ansible.builtin.set_fact": {
            "netplugin_words": [f"{name}={value}" for name, value in found.items() if value is not None],
            "netplugin_names": [spelling(name) for name, pattern in exact.items() if not pattern] or ["(?!)"],
            "netplugin_exact": [pattern for pattern in exact.values() if pattern] or ["(?!)"],
        },
    }
    yield from _scripts()
    yield from _lines()
    yield {
        "name": "Report what no known boot loader was given",
        "ansible.builtin.debug": {
            "msg": ["Add to the kernel's command line:", Template("{{ netplugin_words | join(' ') }}"), *left]
        },
        "when": Template(
            "netplugin_loader == 'unknown' or (netplugin_loader == 'systemd-boot' and "
            f"{_read(f'{_ENTRIES}|{_PROXMOX}')} | length == 0)"
        ),
    }


def _loader() -> Iterator[Task]:
    """Find what started the machine: files of a boot loader may be there without that."""
    yield {
        "name": "Look for files of boot loaders",
        "ansible.builtin.find": {
            "paths": list(_FOLDERS),
            "patterns": ["LoaderInfo-*", "cmdline", "grub", "proxmox-boot-uuids", "*.cfg", "*.conf"],
            "recurse": True,
            "depth": 4,
        },
        "register": "netplugin_files",
    }
    yield {
        "name": "Read files of boot loaders",
        "ansible.builtin.slurp": {"src": Template("{{ item.path }}")},
        "loop": Template(
            "{{ netplugin_files.files | selectattr('path', 'match', netplugin_paths | join('|')) }}"
        ),
        "loop_control": {"label": Template("{{ item.path }}")},
        "vars": {"netplugin_paths": list(_FILES)},
        "register": "netplugin_read",
    }
    started = f"{_read('/sys/')} | map(attribute='content') | map('b64decode', 'utf-16-le') | join"
    yield {
        "name": "Choose the boot loader that started the machine",
        "ansible.builtin.set_fact": {
            "netplugin_loader": Template(
                "{{ 'systemd-boot' if 'systemd-boot' in netplugin_started else 'grub-entries'"
                " if netplugin_menus | select('search', netplugin_entries) | list | length > 0"
                " else 'grub' if netplugin_menus | length > 0 else 'unknown' }}"
            )
        },
        "vars": {
            "netplugin_started": Template(f"{{{{ {started} }}}}"),
            "netplugin_menus": Template(
                f"{{{{ {_MENU} | map(attribute='content') | map('b64decode') | list }}}}"
            ),
            "netplugin_entries": READS_ENTRIES,
        },
    }


def update_loader() -> Task:
    """The handler for settings that are not read when the machine starts."""
    menu = f"({_MENU} | map(attribute='item.path') | first)"
    return {
        "name": _UPDATE_LOADER,
        "ansible.builtin.command": {
            "argv": Template(
                "{{ ['proxmox-boot-tool', 'refresh'] if netplugin_loader == 'systemd-boot'"
                " else ['update-grub'] if ansible_facts.os_family == 'Debian'"
                f" else ['grub-mkconfig' if {menu} == '/boot/grub/grub.cfg' else 'grub2-mkconfig',"
                f" '-o', {menu}] }}}}"
            )
        },
        "changed_when": True,
        "when": Template(
            "netplugin_loader == 'grub' or (netplugin_loader == 'systemd-boot' and "
            f"{_read(_PROXMOX)} | length > 0)"
        ),
    }


def _rewritten(name: str, files: str, variables: dict[str, str], when: str) -> Task:
    """Write ``netplugin_new`` of each of the files."""
    return {
        "name": name,
        "ansible.builtin.copy": {
            "dest": Template("{{ item.item.path }}"),
            "content": Template("{{ netplugin_new }}"),
            "mode": Template("{{ item.item.mode }}"),
            "follow": True,
        },
        **_each(files, variables, when),
        "notify": _UPDATE_LOADER,
    }


def _each(files: str, variables: dict[str, str], when: str) -> Task:
    return {
        "loop": Template(f"{{{{ {_read(files)} }}}}"),
        "loop_control": {"label": Template("{{ item.item.path }}")},
        "vars": variables,
        "when": Template(when),
    }


def _outdated(quote: str, plain: str, before: str, after: str) -> Template:
    """A regular expression for words that the arguments replace, and the blanks before them."""
    names = "(?:{{ netplugin_names | join('|') }})"
    exact = "(?:{{ netplugin_exact | map('replace', '@', netplugin_quote) | join('|') }})"
    words = rf'{names}=(?:{quote}[^"\n]*{quote}|{plain})*|{exact}'
    quoted = rf'{quote}{names}=[^"\n]*{quote}|{quote}{exact}{quote}'
    return Template(rf"[ \t]*{before}(?:{words}|{quoted}){after}")


def _scripts() -> Iterator[Task]:
    """Settings of grub's scripts, where quotes in a line have a backslash or are in other quotes."""
    # Ansible takes a backslash in a string of a template for itself, so such strings are variables.
    variables = {
        "netplugin_own": r"(?m)^.* # By netplugin\n",
        "netplugin_line": Template(
            """GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {{ netplugin_words | join(' ') }}" # By netplugin"""
        ),
        "netplugin_quote": r"\\" '"',
        "netplugin_outdated": _outdated(
            *(r"\\" '"', r"""[^\s"'\\]|"[^"'\s]+"(?=[\s'])""", r"""(?<=[\s"'=])""", r"""(?![^\s"'])""")
        ),
        "netplugin_kept": Template(
            f"{{{{ {_FOUND} | regex_replace(netplugin_own, '') | regex_replace(netplugin_outdated, '') }}}}"
        ),
        "netplugin_new": Template(
            f"{{% if item.item.path != '{_GRUB}' or ({_DEBIAN}) %}}\n{{{{ netplugin_kept }}}}{{% else %}}\n"
            "{{ netplugin_kept.rstrip() }}\n{{ netplugin_line }}\n{% endif %}"
        ),
    }
    by_grub = "netplugin_loader in ['grub', 'grub-entries']"
    yield _rewritten("Take older values out of grub's own files", _SCRIPTS, variables, by_grub)
    lines = [
        "{% for word in netplugin_words %}",
        'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {{ word }}"',
        "{% endfor %}",
    ]
    snippet = file_with("Set the kernel's arguments", _SNIPPET, lines)
    copy = snippet["ansible.builtin.copy"]
    copy["content"] = Template(copy["content"])
    yield notified(snippet, _UPDATE_LOADER) | {"when": Template(_DEBIAN)}


def _lines() -> Iterator[Task]:
    """Entries (uapi-group.org, Boot Loader Specification), and what kernel-install makes new ones of."""
    yield {
        "name": "Read the arguments that entries have from the environment of grub",
        "ansible.builtin.command": {"argv": ["grub2-editenv", "-", "list"]},
        "register": "netplugin_environment",
        "changed_when": False,
        "check_mode": False,
        "when": Template(
            f"netplugin_loader == 'grub-entries' and {_read(_ENTRIES)} | map(attribute='content') "
            "| map('b64decode') | select('search', 'kernelopts') | list | length > 0"
        ),
    }
    outdated = {
        "netplugin_quote": '"',
        "netplugin_outdated": _outdated('"', r'[^\s"]', r"(?<!\S)", r"(?!\S)"),
    }
    options = "(netplugin_environment.stdout | default('') | regex_findall('(?m)^kernelopts=.*$') | join)"
    kept = f"{options} | regex_replace(netplugin_outdated, '')"
    yield command(
        "Take older values out of the environment of grub",
        *("grub2-editenv", "-", "set", Template(f"{{{{ {kept} }}}}")),
    ) | {"vars": outdated, "when": Template(f"{kept} != {options}")}
    variables = outdated | {
        "netplugin_kept": Template(f"{{{{ {_FOUND} | regex_replace(netplugin_outdated, '') }}}}"),
        "netplugin_end": Template(
            f"{{{{ netplugin_first if item.item.path == '{_CMDLINE}' else netplugin_last }}}}"
        ),
        "netplugin_first": rf"\A((?:#[^\n]*\n)*{_END}",
        "netplugin_last": rf"(?s)\A((?:.*\n)?options\b{_END}",
        "netplugin_with": Template(r"\g<1> {{ netplugin_words | join(' ') }}"),
        "netplugin_new": Template(
            "{% if netplugin_kept is search(netplugin_end) %}\n"
            "{{ netplugin_kept | regex_replace(netplugin_end, netplugin_with) }}{% else %}\n"
            "{{ netplugin_kept.rstrip() }}\noptions {{ netplugin_words | join(' ') }}\n{% endif %}"
        ),
    }
    files = f"{_ENTRIES}|{_CMDLINE}"
    when = "netplugin_loader in ['systemd-boot', 'grub-entries']"
    when += rf" and (item.item.path == '{_CMDLINE}' or {_FOUND} is search('(^|\n)linux'))"
    yield _rewritten("Set the kernel's arguments in entries", files, variables, when)
    yield {
        "name": "Report lines whose end the kernel would cut",
        "ansible.builtin.debug": {
            "msg": Template(f"The kernel keeps {KEPT} bytes of {{{{ item.item.path }}}}")
        },
        **_each(files, variables, f"{when} and netplugin_new.splitlines() | map('length') | max > {KEPT}"),
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
            ]
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
            ]
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
                ]
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
