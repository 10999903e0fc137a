"""Render a guest's plan as an Ansible playbook of ansible.builtin modules.

The playbook is idempotent and does not reboot.
"""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.tuning.guest.plan import GuestPlan
from netplugin.tuning.guest.playbook_binding import binding_tasks
from netplugin.tuning.output.playbook import as_yaml, same_machine, step_tasks, until_boot
from netplugin.tuning.output.tasks import Task, command, file_with
from netplugin.tuning.steps import Effect

_RULES = "/etc/udev/rules.d/90-netplugin-guest.rules"
_RELOAD, _TRIGGER = "Load udev's rules", "Apply udev's rules to NICs"
#: Interrupts of virtio NIC queues in /proc/interrupts.
_QUEUES = r"(?m)^\s*([0-9]+):.*\bvirtio[0-9]+-(?:input|output)\.[0-9]+\s*$"


def guest_playbook(plan: GuestPlan) -> str:
    """Return YAML. The playbook refuses a guest whose online vCPUs differ from the domain's."""
    tasks = [
        *same_machine(plan.online),
        *step_tasks(plan.steps),
        *_interrupts(plan),
        *_kernel_nics(plan),
        *binding_tasks(plan),
        *_rest(plan),
    ]
    handlers = [
        command(_RELOAD, "udevadm", "control", "--reload"),
        command(_TRIGGER, "udevadm", "trigger", "--action=add", "--subsystem-match=net"),
    ]
    return as_yaml(
        f"Set up the guest {plan.domain.name} for packets, as netplugin planned it", tasks, handlers
    )


def _interrupts(plan: GuestPlan) -> Iterator[Task]:
    if not plan.isolated:
        return
    yield {"name": "Look for services", "ansible.builtin.service_facts": {}}
    yield {
        "name": "Stop irqbalance, which would bring interrupts back",
        "ansible.builtin.service": {"name": "irqbalance", "state": "stopped", "enabled": False},
        "when": "'irqbalance.service' in ansible_facts.services",
    }
    yield {
        "name": "Read the interrupts",
        "ansible.builtin.slurp": {"src": "/proc/interrupts"},
        "register": "netplugin_interrupts",
    }
    cpus = format_list(plan.housekeeping)
    lines = [
        "{% for irq in netplugin_irqs %}",
        f"w- /proc/irq/{{{{ irq }}}}/smp_affinity_list - - - - {cpus}",
        "{% endfor %}",
    ]
    folder, file = until_boot("Keep queues of virtio NICs off isolated vCPUs", lines)
    yield folder
    yield file | {
        "vars": {
            "netplugin_irqs": "{{ netplugin_interrupts.content | b64decode"
            " | regex_findall(netplugin_queues) }}",
            "netplugin_queues": _QUEUES,
        }
    }


def _kernel_nics(plan: GuestPlan) -> Iterator[Task]:
    """Set MTU and queues by udev rules, so that they also apply to hot-plugged NICs and under any name."""
    rules = []
    for each in plan.nics:
        wanted = []
        if each.mtu:
            wanted.append(f'ATTR{{mtu}}="{each.mtu}"')
        if each.channels:
            wanted.append(f'RUN+="/usr/sbin/ethtool -L $name combined {each.channels}"')
        if wanted:
            match = (
                f'ACTION=="add", SUBSYSTEM=="net", DRIVERS=="?*", ATTR{{address}}=="{each.nic.mac}"'
            )
            rules.append(", ".join([match, *wanted]))
    if not rules:
        return
    if any(each.channels for each in plan.nics):
        yield _package("ethtool")
    yield file_with("Set queues and MTU of NICs that stay with the kernel", _RULES, rules) | {
        "notify": [_RELOAD, _TRIGGER]
    }


def _package(name: str) -> Task:
    return {
        "name": f"Install {name}",
        "ansible.builtin.package": {"name": name, "state": "present"},
    }


def _rest(plan: GuestPlan) -> Iterator[Task]:
    if any(step.effect is Effect.REBOOT for step in plan.steps):
        yield {
            "name": "Say what is left to do",
            "ansible.builtin.debug": {"msg": "the kernel's arguments count after a reboot"},
        }
