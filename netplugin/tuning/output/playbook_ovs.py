"""Tasks that set ``other_config`` of OVS where it differs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.output.tasks import Task

#: Pairs of other_config in OVSDB's JSON encoding of a map (RFC 7047).
_FOUND = "(netplugin_ovs.stdout | from_json).data[0][0][1]"


def ovs_tasks(settings: list[tuple[str, str | None]]) -> Iterator[Task]:
    """``settings`` are keys and values; None removes the key. ``--no-wait``, because vswitchd may be down or
    waiting for memory."""
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
