"""Render a guest's plan as an Ansible playbook of ansible.builtin modules.

The playbook is idempotent and does not reboot.
"""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.host.nic_models import KEPT_BY_DPDK
from netplugin.tuning.guest.plan import GuestPlan
from netplugin.tuning.output.playbook import as_yaml, same_machine, step_tasks, until_boot
from netplugin.tuning.output.playbook_tasks import (
    Task,
    Template,
    command,
    file_with,
    folder,
    jinja,
    reading,
    slurp,
    stop,
    task,
)
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
    name = f"Set up the guest {plan.domain.name} for packets, as netplugin planned it"
    return as_yaml(name, tasks, handlers)


def _interrupts(plan: GuestPlan) -> Iterator[Task]:
    if not plan.isolated:
        return
    yield task("Look for services", "service_facts")
    stopped = {"name": "irqbalance", "state": "stopped", "enabled": False}
    there = Template("'irqbalance.service' in ansible_facts.services")
    yield task("Stop irqbalance, which would bring interrupts back", "service", **stopped, when=there)
    yield slurp("Read the interrupts", "/proc/interrupts", "netplugin_interrupts")
    cpus = format_list(plan.housekeeping)
    lines = [
        "{% for irq in netplugin_irqs %}",
        f"w- /proc/irq/{{{{ irq }}}}/smp_affinity_list - - - - {cpus}",
        "{% endfor %}",
    ]
    made, file = until_boot("Keep queues of virtio NICs off isolated vCPUs", lines, evaluated=True)
    yield made
    irqs = jinja("netplugin_interrupts.content | b64decode | regex_findall(netplugin_queues)")
    yield file | {"vars": {"netplugin_irqs": irqs, "netplugin_queues": _QUEUES}}


def _kernel_nics(plan: GuestPlan) -> Iterator[Task]:
    """Set MTU and queues by udev rules, so that they also apply to hot-plugged NICs and under any name."""
    rules = []
    for each in plan.nics:
        desired = []
        if each.mtu:
            desired.append(f'ATTR{{mtu}}="{each.mtu}"')
        if each.channels:
            desired.append(f'RUN+="/usr/sbin/ethtool -L $name combined {each.channels}"')
        if desired:
            match = f'ACTION=="add", SUBSYSTEM=="net", DRIVERS=="?*", ATTR{{address}}=="{each.nic.mac}"'
            rules.append(", ".join([match, *desired]))
    if not rules:
        return
    if any(each.channels for each in plan.nics):
        yield _package("ethtool")
    written = file_with("Set queues and MTU of NICs that stay with the kernel", _RULES, rules)
    yield written | {"notify": [_RELOAD, _TRIGGER]}


def _package(name: str) -> Task:
    return task(f"Install {name}", "package", name=name, state="present")


def _rest(plan: GuestPlan) -> Iterator[Task]:
    if any(step.effect is Effect.REBOOT for step in plan.steps):
        yield task("Say what is left to do", "debug", msg="the kernel's arguments count after a reboot")


# NICs are found by MAC address, not by PCI address. The kernel does not know the MAC address of a bound NIC,
# so its PCI address is kept as a local Ansible fact.
_FACTS = "/etc/ansible/facts.d"
_NOIOMMU = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"
_PCI = "[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]"
#: The PCI network device with the MAC address, not a bond, bridge or failover device with the same one.
_DEVICE = jinja(
    "ansible_facts.values() | select('mapping') | selectattr('pciid', 'defined')"
    " | selectattr('macaddress', 'defined') | selectattr('macaddress', 'equalto', item.mac)"
    " | map(attribute='device') | first | default('')"
)


def binding_tasks(plan: GuestPlan) -> Iterator[Task]:
    if not plan.bound:
        return
    driver = plan.options.driver
    nics = [{"mac": each.nic.mac, "where": each.nic.address or "not known"} for each in plan.bound]
    yield from _module(driver, plan.noiommu)
    yield from _find(nics)
    yield from _bind(driver)


def _module(driver: str, noiommu: bool) -> Iterator[Task]:
    yield _package("driverctl")
    yield file_with(f"Load {driver} at boot", "/etc/modules-load.d/netplugin-guest.conf", [driver])
    if noiommu:
        yield file_with(
            "Let VFIO do without an IOMMU at boot",
            "/etc/modprobe.d/netplugin-guest.conf",
            ["options vfio enable_unsafe_noiommu_mode=1"],
        )
    yield task(f"Load {driver} now", "command", argv=["modprobe", driver], changed_when=False)
    if noiommu:
        yield from _without_iommu()


def _without_iommu() -> Iterator[Task]:
    name, there = "Look whether VFIO can do without an IOMMU", Template("netplugin_noiommu.stat.exists")
    yield task(name, "stat", path=_NOIOMMU, register="netplugin_noiommu")
    message = "Debian's kernels are such: plan with --driver uio_pci_generic, or take another"
    played = Template("not ansible_check_mode")
    yield stop("Stop on a kernel whose VFIO cannot", there, message, when=played)
    yield slurp("Read whether VFIO does without an IOMMU", _NOIOMMU, "netplugin_noiommu_now", when=there)
    when = [there, Template("netplugin_noiommu_now.content | b64decode | trim != 'Y'")]
    tee = {"argv": ["tee", _NOIOMMU], "stdin": "Y"}
    yield task("Let VFIO do without an IOMMU", "command", **tee, when=when, changed_when=True)


def _find(nics: list[dict[str, str]]) -> Iterator[Task]:
    device = Template("/sys/class/net/{{ netplugin_device }}/device")
    each = {"vars": {"netplugin_device": _DEVICE}, "loop": nics}
    name, when = "Find the NICs for DPDK by their MAC addresses", Template("netplugin_device | length > 0")
    yield reading(name, "netplugin_found", "readlink", "--canonicalize", device, **each, when=when)
    before = jinja("ansible_facts.ansible_local.netplugin_guest | default({})")
    name = "Recall where they were before they were bound"
    yield task(name, "set_fact", netplugin_addresses=before)
    on_pci = "netplugin_found.results | selectattr('stdout', 'defined')"
    yield task(
        "Take down where they are on PCI",
        "set_fact",
        netplugin_addresses=jinja("netplugin_addresses | combine({item.item.mac: netplugin_at})"),
        vars={"netplugin_at": jinja(f"item.stdout | regex_findall('{_PCI}') | last")},
        loop=jinja(f"{on_pci} | selectattr('stdout', 'search', '/pci')"),
        loop_control={"label": jinja("item.item.mac")},
    )
    message = Template("No NIC has the MAC address {{ item.mac }}; libvirt has it at {{ item.where }}")
    yield stop("Stop if one is not there", "item.mac in netplugin_addresses", message, loop=nics)
    name, other = "Stop if one of them is the way to this guest", "item.mac != (ansible_facts"
    message = Template("The default route goes through {{ item.mac }}: plan with --dpdk and other NICs")
    yield stop(name, f"{other}.default_ipv4.macaddress | default(''))", message, loop=nics)
    yield folder("Make the folder of local facts", _FACTS)
    facts = jinja("netplugin_addresses | to_json(sort_keys=true)")
    file = f"{_FACTS}/netplugin_guest.fact"
    yield task("Remember where they are", "copy", dest=file, content=facts, mode="0644")


def _bind(driver: str) -> Iterator[Task]:
    path, loop = Template("/sys/bus/pci/devices/{{ item.value }}/driver"), "netplugin_addresses | dict2items"
    name = "Read what drivers they have"
    yield task(name, "stat", path=path, loop=jinja(loop), register="netplugin_drivers")
    now = "item.stat.lnk_source | default('') | basename"
    # driverctl overrides persist across boots.
    bind = command(f"Bind them to {driver}", "driverctl", "set-override", jinja("item.item.value"), driver)
    yield bind | {
        "loop": jinja("netplugin_drivers.results"),
        "loop_control": {"label": Template("{{ item.item.key }} {{ item.item.value }}")},
        "when": Template(f"{now} not in {[driver, *sorted(KEPT_BY_DPDK)]}"),
    }
