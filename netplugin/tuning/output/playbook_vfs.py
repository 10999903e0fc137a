"""Tasks that create VFs on PFs that have none, now and at each boot."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.output.tasks import Task, file_with
from netplugin.tuning.read.network import PCI

#: A udev rule, because at boot the time at which the NIC's driver loads is not known.
_RULES = "/etc/udev/rules.d/90-netplugin-tuning.rules"


def vf_tasks(counts: list[tuple[str, str]]) -> Iterator[Task]:
    """``counts`` are PCI addresses and numbers. Existing VFs in another number must be removed first."""
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
