"""Tasks that set the kernel command line: a grub.d file on Debian, grubby on Red Hat."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.output.tasks import Task, command, file_with, notified
from netplugin.tuning.steps import KernelArgument, Step

UPDATE_GRUB = "Update grub"
_GRUB = "/etc/default/grub"
_DEBIAN = "ansible_facts.os_family == 'Debian' and netplugin_grub.stat.exists"
#: Arguments that grubby reports for the next boot.
_FOUND = r"""netplugin_grubby.stdout | regex_findall('[^\s"]+')"""
_NAMES = "netplugin_names | map('regex_escape') | join('|')"
_ANY_OF_THEM = f"{{{{ {_NAMES} }}}}"
_RED_HAT = "ansible_facts.os_family == 'RedHat'"


def kernel_tasks(steps: tuple[Step, ...]) -> Iterator[Task]:
    found = [(s.target.name, s.wanted) for s in steps if isinstance(s.target, KernelArgument)]
    if not found:
        return
    words = [f"{name}={wanted}" for name, wanted in found if wanted is not None]
    gone = [name for name, wanted in found if wanted is None]
    yield {
        "name": "Look for the settings of grub",
        "ansible.builtin.stat": {"path": _GRUB},
        "register": "netplugin_grub",
    }
    yield from _debian([name for name, _ in found], words)
    yield from _red_hat(words, gone)
    left = ["Remove from the kernel's command line:", *gone] if gone else []
    yield {
        "name": "Say what no known boot loader was told",
        "ansible.builtin.debug": {"msg": ["Add to the kernel's command line:", *words, *left]},
        "when": f"not ({_RED_HAT} or netplugin_grub.stat.exists)",
    }


def _debian(names: list[str], words: list[str]) -> Iterator[Task]:
    # With two isolcpus or hugepages arguments the kernel does not use the last one: it warns or adds them up.
    yield {
        "name": "Take older values out of grub's own file",
        "ansible.builtin.replace": {
            "path": _GRUB,
            "regexp": rf"""(?<=[\s"'])(?:{_ANY_OF_THEM})=[^\s"']*[ ]?""",
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
            "grubby", "--update-kernel=ALL", "--remove-args={{ netplugin_names | join(' ') }}",
        ) | {
            "vars": {"netplugin_names": gone},
            "when": [_RED_HAT, f"{_FOUND} | select('match', '(' ~ ({_NAMES}) ~ ')=') | list | length > 0"],
        }  # fmt: skip
    yield command(
        "Set the kernel's arguments with grubby",
        "grubby", "--update-kernel=ALL", "--args={{ netplugin_arguments | join(' ') }}",
    ) | {
        "vars": {"netplugin_arguments": words},
        "when": [_RED_HAT, f"netplugin_arguments | difference({_FOUND}) | length > 0"],
    }  # fmt: skip
