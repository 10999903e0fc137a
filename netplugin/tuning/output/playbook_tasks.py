"""Tasks of a host's playbook: kernel command line, other_config of OVS, kernel threads, VFs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from netplugin.tuning.command_line import KEPT, contradicting, spelling
from netplugin.tuning.read.kernel import BY_GRUB, LOADER_INFO, READS_ENTRIES, STUB_INFO
from netplugin.tuning.read.network import PCI
from netplugin.tuning.steps import KernelArgument, Step

Task: TypeAlias = dict[str, Any]


class Template(str):
    """Text that Ansible evaluates: a condition, or ``{{ }}`` in a value. All other text is data.

    It holds names of variables, constants and numbers only; what was read reaches it as a variable.
    """


def jinja(expression: str) -> Template:
    """Text that is the value of the expression."""
    return Template(f"{{{{ {expression} }}}}")


#: Those that ``task`` puts next to the module.
_KEYWORDS = "register notify vars when loop loop_control changed_when failed_when check_mode".split()


def task(name: str, module: str, /, **words: Any) -> Task:
    """``words`` are the arguments of the builtin module and keywords of the task, both in their order."""
    keywords = {word: words.pop(word) for word in list(words) if word in _KEYWORDS}
    return {"name": name, f"ansible.builtin.{module}": words, **keywords}


def command(name: str, *words: str) -> Task:
    return task(name, "command", argv=list(words), changed_when=True)


def reading(name: str, register: str, *words: str, **more: Any) -> Task:
    """Run a command that changes nothing, in check mode too."""
    return task(
        name, "command", argv=list(words), register=register, changed_when=False, **more, check_mode=False
    )


def stop(name: str, unless: str, message: str, **more: Any) -> Task:
    """Stop with the message unless the condition holds."""
    return task(name, "assert", that=[Template(unless)], fail_msg=message, **more)


def slurp(name: str, path: str, register: str, **more: Any) -> Task:
    """Read a file; its content comes in base64."""
    return task(name, "slurp", src=path, register=register, **more)


def file_with(name: str, path: str, lines: list[str], evaluated: bool = False) -> Task:
    """Write a whole file that netplugin owns; the lines are data unless Ansible is to evaluate them."""
    content = "# Made by netplugin.\n" + "".join(f"{line}\n" for line in lines)
    return task(name, "copy", dest=path, content=Template(content) if evaluated else content, mode="0644")


def folder(name: str, path: str) -> Task:
    return task(name, "file", path=path, state="directory", mode="0755")


_GRUB, _CMDLINE = "/etc/default/grub", "/etc/kernel/cmdline"
_SNIPPET = f"{_GRUB}.d/netplugin-tuning.cfg"
#: proxmox-boot-tool writes entries from /etc/kernel/cmdline to partitions that it mounts for that.
_PROXMOX = "/etc/kernel/proxmox-boot-uuids"
_FOLDERS = (str(PurePosixPath(LOADER_INFO).parent), "/etc/default", "/etc/kernel", "/boot", "/efi/loader")
_FILES = (
    f"(?:{LOADER_INFO}|{STUB_INFO}",
    f"{_CMDLINE}|{_PROXMOX}|{_GRUB}",
    f"(?!{_SNIPPET}){_GRUB}[.]d/[^/]+[.]cfg",
    "/(?:boot|efi|boot/efi)/loader/entries/[^/]+[.]conf",
    "/boot/(?:.*/)?grub[.]cfg)$",
)
#: Those among them, by how their paths begin.
_SCRIPTS, _MENUS, _ENTRIES = _GRUB, "/boot/.*[.]cfg", ".*/entries/"
_UPDATE_LOADER = "Update the boot loader"
_FOUND, _ITEM = "(item.content | b64decode)", jinja("item.path")
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
    yield task(
        "Name the kernel's arguments, and in any spelling what they replace",
        "set_fact",
        netplugin_words=[f"{name}={value}" for name, value in found.items() if value is not None],
        netplugin_names=[spelling(name) for name, pattern in exact.items() if not pattern] or ["(?!)"],
        netplugin_exact=[pattern for pattern in exact.values() if pattern] or ["(?!)"],
    )
    yield from _scripts()
    yield from _lines()
    lines = ["Add to the kernel's command line:", jinja("netplugin_words | join(' ')"), *left]
    nowhere = "netplugin_loader == 'unknown' or (netplugin_loader == 'systemd-boot' and "
    nowhere += f"{_read(f'{_ENTRIES}|{_PROXMOX}')} | length == 0)"
    yield task("Report what no known boot loader was given", "debug", msg=lines, when=Template(nowhere))


def _loader() -> Iterator[Task]:
    """Find what started the machine: files of a boot loader may be there without that."""
    patterns = ["LoaderInfo-*", "StubInfo-*", "cmdline", "grub", "proxmox-boot-uuids", "*.cfg", "*.conf"]
    where = {"paths": list(_FOLDERS), "patterns": patterns, "recurse": True, "depth": 4}
    yield task("Look for files of boot loaders", "find", **where, register="netplugin_files")
    files = jinja("netplugin_files.files | selectattr('path', 'match', netplugin_paths | join('|'))")
    these = {"loop": files, "vars": {"netplugin_paths": list(_FILES)}}
    yield slurp("Read files of boot loaders", _ITEM, "netplugin_read", **these, loop_control={"label": _ITEM})
    yield task(
        "Choose the boot loader that started the machine",
        "set_fact",
        netplugin_loader=jinja(
            "'systemd-boot' if netplugin_started | select('search', 'systemd-boot') | list | length > 0"
            " else 'unknown' if netplugin_started | reject('search', 'GRUB') | list | length > 0"
            f" and '{BY_GRUB}' not in ansible_facts.proc_cmdline | default({{}}) else 'grub-entries'"
            " if netplugin_menus | select('search', netplugin_entries) | list | length > 0"
            " else 'grub' if netplugin_menus | length > 0 else 'unknown'"
        ),
        vars={
            "netplugin_started": jinja(
                f"{_read('/sys/')} | map(attribute='content') | map('b64decode', 'utf-16-le') | list"
            ),
            "netplugin_menus": jinja(f"{_MENU} | map(attribute='content') | map('b64decode') | list"),
            "netplugin_entries": READS_ENTRIES,
        },
    )


def update_loader() -> Task:
    """The handler for settings that are not read when the machine starts."""
    menu = f"({_MENU} | map(attribute='item.path') | first)"
    words = (
        "['proxmox-boot-tool', 'refresh'] if netplugin_loader == 'systemd-boot'"
        " else ['update-grub'] if ansible_facts.os_family == 'Debian'"
        f" else ['grub-mkconfig' if {menu} == '/boot/grub/grub.cfg' else 'grub2-mkconfig', '-o', {menu}]"
    )
    when = "netplugin_loader == 'grub' or (netplugin_loader == 'systemd-boot' and "
    when += f"{_read(_PROXMOX)} | length > 0)"
    return task(_UPDATE_LOADER, "command", argv=jinja(words), changed_when=True, when=Template(when))


def _rewritten(name: str, files: str, variables: dict[str, str], when: str) -> Task:
    """Write ``netplugin_new`` of each of the files."""
    path, content, mode = map(jinja, ("item.item.path", "netplugin_new", "item.item.mode"))
    file = {"dest": path, "content": content, "mode": mode, "follow": True}
    return task(name, "copy", **file, **_each(files, variables, when), notify=_UPDATE_LOADER)


def _each(files: str, variables: dict[str, str], when: str) -> Task:
    label = {"label": jinja("item.item.path")}
    return {"loop": jinja(_read(files)), "loop_control": label, "vars": variables, "when": Template(when)}


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
        "netplugin_kept": jinja(
            f"{_FOUND} | regex_replace(netplugin_own, '') | regex_replace(netplugin_outdated, '')"
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
    snippet = file_with("Set the kernel's arguments", _SNIPPET, lines, evaluated=True)
    yield snippet | {"notify": _UPDATE_LOADER, "when": Template(_DEBIAN)}


def _lines() -> Iterator[Task]:
    """Entries (uapi-group.org, Boot Loader Specification), and what kernel-install makes new ones of."""
    entries = f"{_read(_ENTRIES)} | map(attribute='content') | map('b64decode')"
    asked = f"{entries} | select('search', 'kernelopts') | list | length > 0"
    listing = ("netplugin_environment", "grub2-editenv", "-", "list")
    name = "Read the arguments that entries have from the environment of grub"
    yield reading(name, *listing) | {"when": Template(f"netplugin_loader == 'grub-entries' and {asked}")}
    outdated = {
        "netplugin_quote": '"',
        "netplugin_outdated": _outdated('"', r'[^\s"]', r"(?<!\S)", r"(?!\S)"),
    }
    options = "(netplugin_environment.stdout | default('') | regex_findall('(?m)^kernelopts=.*$') | join)"
    kept = f"{options} | regex_replace(netplugin_outdated, '')"
    taken = command(
        "Take older values out of the environment of grub", "grub2-editenv", "-", "set", jinja(kept)
    )
    yield taken | {"vars": outdated, "when": Template(f"{kept} != {options}")}
    variables = outdated | {
        "netplugin_kept": jinja(f"{_FOUND} | regex_replace(netplugin_outdated, '')"),
        "netplugin_end": jinja(f"netplugin_first if item.item.path == '{_CMDLINE}' else netplugin_last"),
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
    cut = f"{when} and netplugin_new.splitlines() | map('length') | max > {KEPT}"
    yield task(
        "Report lines whose end the kernel would cut",
        "debug",
        msg=Template(f"The kernel keeps {KEPT} bytes of {{{{ item.item.path }}}}"),
        **_each(files, variables, cut),
    )


#: Pairs of other_config in OVSDB's JSON encoding of a map (RFC 7047).
_FOUND_SETTINGS = "(netplugin_ovs.stdout | from_json).data[0][0][1]"
#: vswitchd may be down or waiting for memory.
_VSCTL = ("ovs-vsctl", "--no-wait")


def ovs_tasks(settings: list[tuple[str, str | None]]) -> Iterator[Task]:
    """Set ``other_config`` where it differs: ``settings`` are keys and values; None removes the key."""
    if not settings:
        return
    yield reading(
        "Read other_config of OVS",
        *("netplugin_ovs", *_VSCTL, "--format=json", "--columns=other_config", "list", "Open_vSwitch"),
    )
    pair = Template("other_config:{{ item.key }}={{ item.value }}")
    loop = [{"key": key, "value": value} for key, value in settings if value is not None]
    when = Template(f"[item.key, item.value] not in {_FOUND_SETTINGS}")
    put = command("Set other_config of OVS", *_VSCTL, "set", "Open_vSwitch", ".", pair)
    yield put | {"loop": loop, "when": when}
    if gone := [key for key, value in settings if value is None]:
        words = (*_VSCTL, "remove", "Open_vSwitch", ".", "other_config", jinja("item"))
        when = Template(f"item in ({_FOUND_SETTINGS} | map('first'))")
        yield command("Remove from other_config of OVS", *words) | {"loop": gone, "when": when}


def thread_tasks(threads: str, priority: str) -> Iterator[Task]:
    """A real-time priority, where it differs; ``threads`` is the name without CPU number: ``ksoftirqd``."""
    register = f"netplugin_{threads}"
    # Any process may have the name of a kernel thread, but only kernel threads are kthreadd's children.
    ps = ("ps", "--ppid", "2", "-o", "pid=,cls=,rtprio=,comm=")
    yield reading(f"Read the priorities of {threads}", register, *ps)
    pattern = rf"^\s*\d+\s+(?!FF\s+{priority}\s)\S+\s+\S+\s+{threads}/"
    chrt = ("chrt", "--fifo", "--pid", priority, jinja("(item | split)[0]"))
    loop = jinja(f"{register}.stdout_lines | select('match', netplugin_pattern) | list")
    variables = {"netplugin_pattern": pattern}
    yield command(f"Set the priorities of {threads}", *chrt) | {"vars": variables, "loop": loop}


#: A udev rule, because at boot the time at which the NIC's driver loads is not known.
_RULES = "/etc/udev/rules.d/90-netplugin-tuning.rules"


def vf_tasks(counts: list[tuple[str, str]]) -> Iterator[Task]:
    """Create VFs where there are none, now and at each boot: ``counts`` are PCI addresses and numbers.
    Existing VFs in another number must be removed first."""
    if not counts:
        return
    nics = [{"path": f"{PCI}/{address}/sriov_numvfs", "number": n} for address, n in counts]
    yield slurp("Read how many virtual functions there are", _ITEM, "netplugin_vfs", loop=nics)
    there, each = "item.content | b64decode | trim", {"loop": jinja("netplugin_vfs.results")}
    name = "Stop where there are virtual functions in another number, which may be in use"
    message = Template("Write 0 to {{ item.item.path }} once nobody uses them")
    yield stop(name, f"{there} in ['0', item.item.number]", message, **each)
    other = Template(f"{there} != item.item.number")
    tee = {"argv": ["tee", jinja("item.item.path")], "stdin": jinja("item.item.number")}
    yield task("Enable virtual functions", "command", **tee, **each, when=other, changed_when=True)
    rules = [
        f'ACTION=="add", SUBSYSTEM=="net", KERNELS=="{address}", ATTR{{device/sriov_numvfs}}="{n}"'
        for address, n in counts
    ]
    yield file_with("Enable virtual functions at boot", _RULES, rules)
