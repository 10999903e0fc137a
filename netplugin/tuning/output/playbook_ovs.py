"""Tasks that set ``other_config`` of OVS, only what differs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.output.tasks import Task

#: The pairs of other_config, as OVSDB writes a map in JSON (RFC 7047).
_FOUND = "(netplugin_ovs.stdout | from_json).data[0][0][1]"


def ovs_tasks(settings: list[tuple[str, str | None]]) -> Iterator[Task]:
    """``settings``: key and value, None for no such key. ``--no-wait``: vswitchd may be down, or waiting
    for its memory."""
    if not settings:
        return
    yield {
        "name": "Read other_config of OVS",
        "ansible.builtin.command": {
            "argv": ["ovs-vsctl", "--no-wait", "--format=json", "--columns=other_config", "list",
                     "Open_vSwitch"],
        },
        "register": "netplugin_ovs",
        "changed_when": False,
        "check_mode": False,
    }  # fmt: skip
    yield {
        "name": "Set other_config of OVS",
        "ansible.builtin.command": {
            "argv": ["ovs-vsctl", "--no-wait", "set", "Open_vSwitch", ".",
                     "other_config:{{ item.key }}={{ item.value }}"],
        },
        "loop": [{"key": key, "value": value} for key, value in settings if value is not None],
        "when": f"[item.key, item.value] not in {_FOUND}",
        "changed_when": True,
    }  # fmt: skip
    gone = [key for key, value in settings if value is None]
    if gone:
        yield {
            "name": "Remove from other_config of OVS",
            "ansible.builtin.command": {
                "argv": ["ovs-vsctl", "--no-wait", "remove", "Open_vSwitch", ".", "other_config",
                         "{{ item }}"],
            },
            "loop": gone,
            "when": f"item in ({_FOUND} | map('first'))",
            "changed_when": True,
        }  # fmt: skip
