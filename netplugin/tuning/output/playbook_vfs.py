"""Tasks that enable virtual functions: only where there are none, now and at each boot."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.output.tasks import Task, file_with
from netplugin.tuning.read.network import PCI

#: At boot the NIC's driver comes when it likes, and udev knows when.
_RULES = "/etc/udev/rules.d/90-netplugin-tuning.rules"


def vf_tasks(counts: list[tuple[str, str]]) -> Iterator[Task]:
    """``counts``: PCI address and number. Who has VFs in another number has to take them away first."""
    if not counts:
        return
    nics = [{"path": f"{PCI}/{address}/sriov_numvfs", "number": n} for address, n in counts]
    yield {
        "name": "Read how many virtual functions there are",
        "ansible.builtin.slurp": {"src": "{{ item.path }}"},
        "loop": nics,
        "register": "netplugin_vfs",
    }
    there = "item.content | b64decode | trim"
    yield {
        "name": "Stop where there are virtual functions in another number, which may be in use",
        "ansible.builtin.assert": {
            "that": [f"{there} in ['0', item.item.number]"],
            "fail_msg": "Write 0 to {{ item.item.path }} once nobody uses them",
        },
        "loop": "{{ netplugin_vfs.results }}",
    }
    yield {
        "name": "Enable virtual functions",
        "ansible.builtin.command": {
            "argv": ["tee", "{{ item.item.path }}"],
            "stdin": "{{ item.item.number }}",
        },
        "loop": "{{ netplugin_vfs.results }}",
        "when": f"{there} != item.item.number",
        "changed_when": True,
    }
    rules = [
        f'ACTION=="add", SUBSYSTEM=="net", KERNELS=="{address}", ATTR{{device/sriov_numvfs}}="{n}"'
        for address, n in counts
    ]
    yield file_with("Enable virtual functions at boot", _RULES, rules)
