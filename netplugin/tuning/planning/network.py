"""Choose the NICs that PMD threads serve; plan VFs and the settings of OVS-DPDK (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import from_mask, to_mask
from netplugin.host.nic_models import dpdk_fault, lacks_vfs
from netplugin.host.ovs_versions import ASSIGNS_BY_GROUP, may_not_start, parse_version, with_no_device
from netplugin.host.vfs import in_user_space
from netplugin.tuning import steps
from netplugin.tuning.facts import Facts, HostNic, Live
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import NodePages, is_per_port
from netplugin.tuning.planning.partition import Distances, Partition, nearest
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import Effect, Group, OtherConfig, Step, VfCount, impossible, needed


def chosen_nics(facts: Facts, intent: HostIntent) -> tuple[HostNic, ...]:
    """NICs of the intent; else those bound for DPDK; else the fastest, or all if no speed is known. Unless
    the intent names it, no NIC that DPDK cannot use, nor that of the default route, while there is another.
    Raises: InvalidRequest for a NIC that does not exist."""
    nics = known(facts.network.nics, ())
    if intent.nics:
        return tuple(dict.fromkeys(named(nics, name, "nics") for name in intent.nics))
    nics = tuple(nic for nic in nics if dpdk_fault(nic.address, nic.driver, nic.device) is None) or nics
    bound = tuple(nic for nic in nics if in_user_space(nic.driver))
    if bound:
        return bound
    nics = tuple(nic for nic in nics if not known(nic.default_route, False)) or nics
    mbps = {each.name: each.speed_mbps or 0 for each in known(facts.network.interfaces, ())}  # 0 without link
    speeds = [max((mbps.get(name, 0) for name in nic.interfaces), default=0) for nic in nics]
    return tuple(nic for nic, speed in zip(nics, speeds, strict=True) if speed == max(speeds))


def are_sure(nics: tuple[HostNic, ...], intent: HostIntent) -> bool:
    """True if the NICs are configured or bound to DPDK; else the choice depends on which links are up."""
    return bool(intent.nics) or any(in_user_space(nic.driver) for nic in nics)


def nodes_of(nics: tuple[HostNic, ...], nodes: tuple[int, ...], distances: Distances) -> tuple[int, ...]:
    """Of these nodes those of the NICs, or the nearest to them; the first if the firmware reports none."""
    found = {nearest(known(nic.node, None), nodes, distances) for nic in nics}
    return tuple(sorted(node for node in found if node is not None)) or nodes[:1]


def named(nics: tuple[HostNic, ...], name: str, field: str) -> HostNic:
    """The NIC with this PCI address or interface name. Raises: InvalidRequest naming ``field``."""
    for nic in nics:
        if name in (nic.address, *nic.interfaces):
            return nic
    have = ", ".join("/".join((nic.address, *nic.interfaces)) for nic in nics) or "none"
    raise impossible(field, f"there is no NIC {name[:60]}", f"name one of: {have}")


def vf_steps(facts: Facts, intent: HostIntent) -> Iterator[Step]:
    """One step per named NIC; other NICs keep their VFs. Raises: InvalidRequest for a NIC that does not
    exist, supports no or fewer VFs, or is named twice; HostError for a missing fact."""
    seen = set()
    for entry in intent.vfs:
        name, _, number = entry.rpartition("=")
        nic = named(needed(facts.network.nics), name, "vfs")
        most, why = needed(nic.total_vfs), lacks_vfs(nic.driver, nic.device)
        if nic.address in seen:
            raise impossible("vfs", f"{nic.address} is named twice", "name each NIC once")
        if not most:
            fix = "name another NIC, or switch SR-IOV on in the firmware of NIC and board"
            if why:
                fix = "name a NIC of the hypervisor itself; a VM has one if its own hypervisor gives it a PF"
            raise impossible("vfs", f"{name} has no virtual functions{why and f': {why}'}", fix)
        if int(number) and in_user_space(nic.driver):
            reason = f"{name} is bound to {nic.driver}, and its virtual functions need its kernel driver"
            raise impossible("vfs", reason, f"driverctl unset-override {nic.address}")
        if int(number) > most:
            reason = f"{name} can have {most} virtual functions and not {int(number)}"
            raise impossible("vfs", reason, f"ask for at most {most}")
        seen.add(nic.address)
        now = nic.vfs if isinstance(nic.vfs, Unknown) else str(nic.vfs or 0)
        target, why = VfCount(nic.address), "virtual functions for VMs; a boot takes them away"
        yield Step(Group.VFS, target, now, str(int(number)), Effect.LIVE, why, steps.SRIOV)


def ovs_settings(
    live: Live, partition: Partition, pages: tuple[NodePages, ...], intent: HostIntent
) -> Iterator[Step]:
    """Steps for ``other_config``; none for a host without PMD cores. Source: OVS
    Documentation/intro/install/dpdk.rst and vswitch.xml."""
    if not intent.pmd_cores:
        return
    sizes = {plan.node: plan.ovs_mb for plan in pages}
    memory = ",".join(str(sizes.get(node, 0)) for node in range(max(sizes) + 1))
    restart, source = Effect.OVS_RESTART, steps.OVS_CONFIG
    yield _step(live, "dpdk-init", "true", restart, "OVS starts DPDK only if configured to", source)
    ovs = known(live.ovs, None)
    version, config = (
        (parse_version(None), {}) if ovs is None else (parse_version(ovs.version), ovs.other_config)
    )
    yield from _listed(live)
    yield _mask(live, partition)
    if "dpdk-lcore-mask" in config:
        why = (
            "it pins OVS's main, handler and revalidator threads to one CPU; without it they run on those "
            "that services have"
        )
        yield _step(live, "dpdk-lcore-mask", None, restart, why, source)
    of = "each port" if is_per_port(live) else "the MTUs in use"
    why = f"MB on each node: the buffers of {of} and 512 MB for rings and DPDK itself"
    sources = f"{source}; {steps.OVS_MEMORY}; the 512 MB: {steps.OWN}"
    yield _step(live, "dpdk-socket-mem", memory, restart, why, sources)
    assign = "group" if version >= ASSIGNS_BY_GROUP else "cycles"
    why = "queues go to PMD threads by their measured load"
    yield _step(live, "pmd-rxq-assign", assign, Effect.LIVE, why, steps.OVS_PMD)
    for key, why in (
        ("userspace-tso-enable", "left as found: it changes what VMs see"),
        ("per-port-memory", "left as found: the memory is planned for it"),
    ):
        if key in config:
            yield _step(live, key, config[key], restart, why, source)


def _listed(live: Live) -> Iterator[Step]:
    """The step for dpdk-extra if OVS may not start without it. An OVS that runs with DPDK needs none."""
    if isinstance(live.ovs, Unknown):
        return
    if not may_not_start(parse_version(live.ovs.version), live.ovs.other_config):
        return
    # The database keeps dpdk_initialized when a newer vswitchd could not start; then none answers.
    if live.ovs.dpdk_initialized and live.ovs.silent is None:
        return
    desired = with_no_device(live.ovs.other_config)
    why = (
        "this OVS does not start with DPDK if it lacks the driver of a bus and no device is listed; no "
        "device has this address"
    )
    yield _step(live, "dpdk-extra", desired, Effect.OVS_RESTART, why, steps.OVS_DPDK)


def _now(live: Live, key: str) -> Fact[str | None]:
    return live.ovs if isinstance(live.ovs, Unknown) else live.ovs.other_config.get(key)


def _step(live: Live, key: str, desired: str | None, effect: Effect, why: str, source: str) -> Step:
    return Step(Group.OVS, OtherConfig(key), _now(live, key), desired, effect, why, source)


def _mask(live: Live, partition: Partition) -> Step:
    """The step for pmd-cpu-mask; masks are normalised before they are compared."""
    key, desired = "pmd-cpu-mask", to_mask(partition.polling)
    now, sources = _now(live, key), f"{steps.OVS_CONFIG}; {steps.OVS_SCHEDULING}"
    if isinstance(now, str):
        try:
            now = to_mask(from_mask(now))
        except ValueError:
            now = Unknown(f"other_config:{key}", f"is no mask: {now[:40]!r}")
    why = "one PMD thread on each of these CPUs, on the nodes of the NICs and of VMs"
    return Step(Group.OVS, OtherConfig(key), now, desired, Effect.LIVE, why, sources)
