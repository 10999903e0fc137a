"""What rules are about: a node, a bridge, a domain, each with what belongs to it alone (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from netplugin.api.pmd_models import PmdState
from netplugin.pmd.settings import MASK, masked, read_settings
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import (
    PERFORMANCE,
    CpuFacts,
    Cpus,
    DomainLive,
    HostNic,
    HugepagePool,
    InterfaceFacts,
    IommuFacts,
    Irq,
    KernelFacts,
    Limit,
    OvsLive,
    OvsPortLive,
    PowerFacts,
)
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.partition import NodeShare, cpus_of
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import Group, Step


@dataclass(frozen=True)
class Host:
    """``hugepages`` of all nodes, None if unknown; ``vf_nics``: NICs that support VFs; ``vm_cores``: planned;
    ``homeless``: no NIC of the plan says which of several nodes it is on."""

    unread: tuple[Unknown, ...]
    cpus: CpuFacts
    power: PowerFacts
    kernel: KernelFacts
    irqs: tuple[Irq, ...]
    iommu: IommuFacts
    hugepages: int | None
    vf_nics: tuple[HostNic, ...]
    intent: HostIntent | None
    vm_cores: int
    homeless: bool


def hosts(scene: Scene) -> Iterator[Host]:
    facts, plan = scene.facts, scene.plan
    pools = known(facts.memory.pools, None)
    shares = plan.partition.nodes if plan else ()
    nics = plan.nics if plan else ()
    yield Host(
        unread=tuple(dict.fromkeys((*facts.unknown(), *scene.live.unanswered()))),
        cpus=facts.cpus,
        power=facts.power,
        kernel=facts.kernel,
        irqs=known(facts.interrupts.irqs, ()),
        iommu=facts.iommu,
        hugepages=None if pools is None else sum(known(pool.total, 0) for pool in pools),
        vf_nics=tuple(nic for nic in known(facts.network.nics, ()) if known(nic.total_vfs, None)),
        intent=plan.intent if plan else None,
        vm_cores=sum(len(share.vm) for share in shares),
        homeless=len(shares) > 1 and all(known(nic.node, None) is None for nic in nics),
    )


@dataclass(frozen=True)
class StepGroup:
    """The steps of the plan that belong together."""

    group: Group
    steps: tuple[Step, ...]


def step_groups(scene: Scene) -> Iterator[StepGroup]:
    """Without hugepages, which the rules of a node are about."""
    steps = scene.plan.steps if scene.plan else ()
    for group in Group:
        if group is not Group.HUGEPAGES and (own := tuple(step for step in steps if step.group is group)):
            yield StepGroup(group, own)


@dataclass(frozen=True)
class Cgroup:
    """A control group with limits, and what the plan needs in it: CPUs, and MB in pages of each size.

    systemd runs vswitchd in system.slice, libvirt runs VMs in machine.slice.
    """

    limit: Limit
    online: Cpus
    memory_bytes: int
    needs_cpus: Cpus
    needs_mb: Mapping[int, int]


def cgroups(scene: Scene) -> Iterator[Cgroup]:
    memory = sum(node.total_kb for node in known(scene.facts.memory.nodes, ())) * 1024
    for limit in scene.facts.limits:
        cpus: Cpus = frozenset()
        sizes: dict[int, int] = defaultdict(int)
        has_ovs, has_vms = (limit.group.startswith(f"/{name}.slice") for name in ("system", "machine"))
        if scene.plan and (has_ovs or has_vms):
            part = scene.plan.partition
            cpus = part.pmd if has_ovs else part.vm | part.emulator
            for pages in scene.plan.pages:
                sizes[pages.size_kb] += pages.ovs_mb if has_ovs else pages.vm_mb
        yield Cgroup(limit, known(scene.facts.cpus.online, frozenset()), memory, cpus, sizes)


@dataclass(frozen=True)
class Node:
    """``share``, ``pages`` and ``polling`` (PMD CPUs) are planned; ``nics`` are those of the plan that are on
    this node and polled here, ``near`` the nodes on which the plan's NICs are polled. ``ports`` of OVS and
    running VMs (``domains``) have their memory here; ``threads`` are the CPUs of PMD threads here, if no port
    is known. ``idle``: neither OVS-DPDK nor a VM runs. ``megabytes`` of hugepages, None if unknown;
    ``elsewhere``: other nodes have some. ``socket_mb`` is its entry of ``dpdk-socket-mem``, None if that is
    not set."""

    number: int
    pools: tuple[HugepagePool, ...] | None
    pages: NodePages | None
    share: NodeShare | None
    polling: Cpus
    nics: tuple[HostNic, ...]
    near: tuple[int, ...]
    intent: HostIntent | None
    ports: tuple[str, ...]
    threads: Cpus
    domains: tuple[str, ...]
    idle: bool
    megabytes: int | None
    elsewhere: bool
    socket_mb: int | None


def nodes(scene: Scene) -> Iterator[Node]:
    facts, plan, ovs = scene.facts, scene.plan, known(scene.live.ovs, None)
    pools, domains = known(facts.memory.pools, None), known(scene.live.domains, ())
    cores, queues = known(facts.cpus.cores, ()), [q for pmd in (ovs.pmds if ovs else ()) for q in pmd.queues]
    shares = {share.node: share for share in plan.partition.nodes} if plan else {}
    pages = {one.node: one for one in plan.pages} if plan else {}
    nics, polled = plan.nics if plan and plan.intent.pmd_cores else (), _polled(scene)
    homes = {nic.address: known(nic.node, None) for nic in nics}
    numbers = {core.node for core in cores} | shares.keys() | pages.keys()
    numbers |= {pool.node for pool in pools or ()} | {node.node for node in known(facts.memory.nodes, ())}
    near = plan.nic_nodes if plan and nics else ()
    sizes: dict[int, int] = defaultdict(int)
    for pool in pools or ():
        sizes[pool.node] += known(pool.total, 0) * pool.size_kb >> 10
    for number in sorted(numbers):
        yield Node(
            number=number,
            pools=None if pools is None else tuple(pool for pool in pools if pool.node == number),
            pages=pages.get(number),
            share=shares.get(number),
            polling=plan.partition.polling_on({number}) if plan else frozenset(),
            nics=tuple(nic for nic in nics if number in near and homes[nic.address] == number),
            near=near,
            intent=plan.intent if plan else None,
            ports=tuple(dict.fromkeys(f"port {q.port}" for q in queues if q.port_numa_node == number)),
            threads=polled & cpus_of(core for core in cores if core.node == number)
            if not queues
            else frozenset(),
            domains=tuple(f"VM {domain.name}" for domain in domains if number in domain.memory_nodes),
            idle=not domains and not (ovs and ovs.dpdk_initialized),
            megabytes=None if pools is None else sizes[number],
            elsewhere=any(size for node, size in sizes.items() if node != number),
            socket_mb=_socket_mb(ovs, number),
        )


def _socket_mb(ovs: OvsLive | None, node: int) -> int | None:
    """The entry of a node; nodes that the list does not reach get none (vswitch.xml, dpdk-socket-mem)."""
    listed = (ovs.other_config.get("dpdk-socket-mem") if ovs else None) or ""
    parts = [part.strip() for part in listed.split(",")]
    sizes = [int(part) if part.isdecimal() else 0 for part in parts]  # eal_parse_socket_arg: empty is 0
    return None if not any(parts) else sizes[node] if node < len(sizes) else 0


#: Bytes that a device adds to what its MTU counts, at least and at most: over IPv4 and IPv6, where it can be
#: over both. VXLAN_HEADROOM in include/net/vxlan.h; drivers/net/geneve.c; gre_calc_hlen, and Ethernet's 14
#: for gretap; net/ipv4/ipip.c and sit.c; net/ipv6/ip6_tunnel.c, whose encapsulation limit is an option;
#: MESSAGE_MINIMUM_LENGTH and UDP in drivers/net/wireguard/device.c; macsec_change_mtu; hsr_get_max_mtu; the
#: tags in net/dsa, for which the kernel makes the device below wider if it can. The tag of a VLAN is
#: outside the MTU (vlan_dev_change_mtu), but above macsec (netif_reduces_vlan_mtu).
HEADERS = {
    **dict.fromkeys(("vxlan", "geneve"), (50, 70)),
    **{"gretap": (38, 58), "gre": (24, 24), "ip6gre": (44, 44), "ipip": (20, 20), "sit": (20, 20)},
    **{"ip6tnl": (40, 48), "wireguard": (60, 80), "macsec": (32, 32), "hsr": (6, 6), "dsa": (0, 32)},
}


@dataclass(frozen=True)
class Nic:
    """A NIC. ``planned``: PMD threads of the plan serve it, on the nodes ``served``; ``named``: the operator
    names the NICs for DPDK."""

    nic: HostNic
    planned: bool
    named: bool
    served: tuple[int, ...]


def nics(scene: Scene) -> Iterator[Nic]:
    plan = scene.plan
    served = plan.nic_nodes if plan and plan.intent.pmd_cores else ()
    for nic in known(scene.facts.network.nics, ()):
        yield Nic(nic, plan is not None and nic in plan.nics, bool(plan and plan.intent.nics), served)


_OVS = "ovs-system"
#: Where the next hop is: below for sure, the widest that a tunnel could take, or the other end of a veth.
BELOW, AT_MOST, PEER = "{} below it", "{}, the widest that may be below it,", "its other end {}"


@dataclass(frozen=True)
class Hop:
    """An interface that frames pass, and its MTU without what is added to them: at least ``header`` bytes, at
    most ``header + spare``. ``filled``: a device above it has its whole MTU."""

    name: str
    mtu: int
    header: int = 0
    spare: int = 0
    where: str = BELOW
    filled: bool = False


def _by_name(scene: Scene) -> dict[str, InterfaceFacts]:
    """The interfaces of the kernel whose MTU is known."""
    interfaces = known(scene.facts.network.interfaces, ())
    return {one.name: one for one in interfaces if not isinstance(one.mtu, Unknown)}


def _hop(one: InterfaceFacts, header: int = 0, spare: int = 0, where: str = BELOW) -> Hop:
    return Hop(one.name, known(one.mtu, 0) - header, header, spare, where)


@dataclass(frozen=True)
class Link:
    """A kernel interface and those next to it: the NIC of a VLAN, the members of a bond, the end of a veth.

    ``desired`` is the largest MTU that is planned, for the NICs of the plan.
    """

    own: Hop
    next_hops: tuple[Hop, ...]
    desired: int


def links(scene: Scene) -> Iterator[Link]:
    """Without bridges, and those whose MTU says nothing of what they are made of: the kernel's device of OVS,
    and a VRF, which has more than any packet."""
    named, plan = _by_name(scene), scene.plan
    planned = {name for nic in plan.nics for name in nic.interfaces} if plan else set()
    indices = {one.index: one for one in named.values()}
    lowers = {name: set(one.lowers) for name, one in named.items()}
    for name, one in named.items():
        lowers.get(one.master or "", set()).add(name)
    filled = {
        low
        for name in named
        for low in lowers[name] & named.keys()
        if known(named[name].mtu, 0) >= known(named[low].mtu, 0)
    }
    real = [one for one in named.values() if one.kind not in {*HEADERS, "tun"} and not one.lowers]
    grounds = [one for one in real if one.state != "down"]
    for name, one in named.items():
        if one.kind == "bridge" or name == _OVS or known(one.mtu, 0) > 65535:
            continue
        header, most = HEADERS.get(one.kind or "", (0, 0))
        other = indices.get(one.link) if one.link and one.link != one.index else None
        if other and header:
            lowers[name].add(other.name)
        hops = []
        for lower in (named[lower] for lower in sorted(lowers[name] & named.keys())):
            tag = 4 if (one.kind, lower.kind) == ("vlan", "macsec") else 0
            hop = _hop(lower, header + tag, most - header)
            hops.append(replace(hop, filled=lower.name in filled or lower.kind == "bridge"))
        if other and (other.link, other.kind, one.kind) == (one.index, None, None):
            hops.append(_hop(other, where=PEER))
        if header and grounds and not (hops or one.master == _OVS or one.state == "down"):
            widest = max(grounds, key=lambda ground: known(ground.mtu, 0))
            hops.append(_hop(widest, header, most - header, AT_MOST))
        yield Link(_hop(one), tuple(hops), max(plan.intent.mtus) if plan and name in planned else 0)


@dataclass(frozen=True)
class Bond:
    """``coarse``: it spreads flows by a hash of layer 2 alone; ``down`` are the members without link."""

    name: str
    what: str
    coarse: bool
    fix: str
    members: int
    down: tuple[str, ...]


def bonds(scene: Scene) -> Iterator[Bond]:
    named = _by_name(scene)
    for bond in scene.facts.network.bonds:
        mode, policy, members = known(bond.mode, "?"), known(bond.hash_policy, "?"), known(bond.members, ())
        coarse = mode in ("balance-xor", "802.3ad") and policy in ("layer2", "vlan+srcmac")
        fix = f"ip link set {bond.name} type bond xmit_hash_policy layer3+4"
        down = tuple(name for name in members if name in named and named[name].state == "down")
        yield Bond(bond.name, f"{mode} with xmit_hash_policy {policy}", coarse, fix, len(members), down)
    for name, ports in _grouped(_ovs_ports(scene), "port").items():
        if how := ports[0].bond_mode:
            fix = f"ovs-vsctl set Port {name} bond_mode=balance-tcp lacp=active, with LACP on the switch"
            down = tuple(port.name for port in ports if port.link is False)
            what = f"{how}, which spreads by MAC and VLAN"
            yield Bond(name, what, how == "balance-slb", fix, len(ports), down)


@dataclass(frozen=True)
class Bridge:
    """``ports`` are those of VMs; ``out`` is the widest way out of the bridge for them, None without one.

    A bridge of the kernel has an MTU of its own (``own``), next to those of ``all_ports``.
    """

    name: str
    ports: tuple[Hop, ...]
    out: Hop | None
    own: Hop | None = None
    all_ports: tuple[Hop, ...] = ()


def bridges(scene: Scene) -> Iterator[Bridge]:
    named = _by_name(scene)
    devices = {name for nic in known(scene.facts.network.nics, ()) for name in nic.interfaces}
    leading = {name for name, one in named.items() if one.kind in HEADERS} | (devices & named.keys())
    uppers, count = {name: one.lowers for name, one in named.items() if one.kind != "bridge"}, -1
    while count != len(leading):
        count, leading = len(leading), leading | {n for n, low in uppers.items() if leading.intersection(low)}
    for name, one in named.items():
        if one.kind == "bridge":
            hops = [_hop(port) for port in named.values() if port.master == name]
            ways = [hop for hop in hops if hop.name in leading]
            ports = tuple(hop for hop in hops if hop.name not in leading)
            yield Bridge(name, ports, _least(ways), _hop(one), tuple(hops))
    yield from _ovs_bridges(_ovs_ports(scene), leading)


def _ovs_bridges(ports: Collection[OvsPortLive], leading: Collection[str]) -> Iterator[Bridge]:
    """The ways out of a bridge are its uplinks, its tunnels, and those of the bridges that patch ports reach:
    which of them a port's frames take, only flows say."""
    grouped, home = _grouped(ports, "bridge"), {port.name: port.bridge or "" for port in ports}
    uplinks = [port for port in ports if port.mtu and (port.type == "dpdk" or port.name in leading)]
    least = {
        name: _least(Hop(p.name, p.mtu or 0) for p in own)
        for name, own in _grouped(uplinks, "bridge").items()
    }
    wide = max((hop for hop in least.values() if hop), key=lambda hop: hop.mtu, default=None)
    for name, own in grouped.items():
        reached, ways = [name], []
        for at in reached:
            ways += [hop for hop in (least.get(at),) if hop]
            for port in grouped.get(at, ()):
                if port.header is not None and wide:
                    ways.append(Hop(wide.name, wide.mtu - port.header, port.header))
                if port.peer in home and home[port.peer] not in reached:
                    reached.append(home[port.peer])
        vms = tuple(Hop(port.name, port.mtu) for port in own if port.mtu and port not in uplinks)
        yield Bridge(name, vms, max(ways, key=lambda hop: hop.mtu, default=None))


def _ovs_ports(scene: Scene) -> tuple[OvsPortLive, ...]:
    ovs = known(scene.live.ovs, None)
    return ovs.ports if ovs else ()


def _grouped(ports: Collection[OvsPortLive], by: Literal["port", "bridge"]) -> dict[str, list[OvsPortLive]]:
    found: dict[str, list[OvsPortLive]] = defaultdict(list)
    for port in ports:
        found[getattr(port, by) or ""].append(port)
    return found


def _least(hops: Iterable[Hop]) -> Hop | None:
    return min(hops, key=lambda hop: hop.mtu, default=None)


@dataclass(frozen=True)
class Ovs:
    """An OVS with DPDK. ``mask`` has the CPUs of ``pmd-cpu-mask``, None if it cannot be parsed; ``pmds``
    those of the threads that run, ``planned`` those of the plan's PMD cores."""

    settings: Mapping[str, str]
    mask: Cpus | None
    pmds: Cpus
    isolated: Cpus | None
    online: Cpus | None
    planned: Cpus


def switches(scene: Scene) -> Iterator[Ovs]:
    """None if OVS was not queried or has no DPDK."""
    ovs = known(scene.live.ovs, None)
    if ovs is None or not ovs.dpdk_initialized:
        return
    written = ovs.other_config.get(MASK, "")
    mask = frozenset(masked(written)) if masked(written) or not written.strip("0x") else None
    cpus, planned = scene.facts.cpus, scene.plan.partition.pmd if scene.plan else frozenset()
    isolated, online = known(cpus.isolated, None), known(cpus.online, None)
    yield Ovs(ovs.other_config, mask, scene.running_pmds, isolated, online, planned)


def pmd_states(scene: Scene) -> Iterator[PmdState]:
    """None if OVS was not queried or has no PMD threads."""
    ovs = known(scene.live.ovs, None)
    if ovs is not None and ovs.pmds:
        settings = read_settings(ovs.other_config)
        yield PmdState(cpus="", cores=ovs.pmds, settings=settings, unpolled=ovs.unpolled)


@dataclass(frozen=True)
class PmdThread:
    """A PMD thread that runs, or that pmd-cpu-mask asks for. ``kind`` is that of its core; ``fast`` are the
    CPUs of performance cores on its node."""

    cpu: int
    runs: bool
    kind: str
    fast: Cpus


def _polled(scene: Scene) -> Cpus:
    """CPUs of the PMD threads that run, or that pmd-cpu-mask asks for."""
    ovs = known(scene.live.ovs, None)
    mask = frozenset(masked(ovs.other_config.get(MASK))) if ovs and ovs.dpdk_initialized else frozenset()
    return scene.running_pmds | mask


def pmd_threads(scene: Scene) -> Iterator[PmdThread]:
    cores, polled = known(scene.facts.cpus.cores, ()), _polled(scene)
    for core in cores:
        fast = cpus_of(one for one in cores if one.node == core.node and one.kind == PERFORMANCE)
        for cpu in sorted(core.cpus & polled):
            yield PmdThread(cpu, cpu in scene.running_pmds, core.kind, fast)


@dataclass(frozen=True)
class Domain:
    """A running VM; ``nodes`` are those of the CPUs that its vCPUs may run on, ``near`` those of its memory
    that have CPUs: no vCPU can be next to HBM or CXL memory of its own node. ``siblings`` are the siblings of
    PMD threads."""

    live: DomainLive
    nodes: frozenset[int]
    near: frozenset[int]
    isolated: Cpus
    polling: Cpus
    siblings: Cpus


def domains(scene: Scene) -> Iterator[Domain]:
    """None if libvirt was not queried or runs no domain."""
    isolated = known(scene.facts.cpus.isolated, None) or frozenset()
    cores, polling = known(scene.facts.cpus.cores, ()), scene.polling
    homes = {cpu: core.node for core in cores for cpu in core.cpus}
    siblings = cpus_of(core for core in cores if core.cpus & polling) - polling
    for live in known(scene.live.domains, ()):
        at = frozenset(homes[cpu] for cpus in live.vcpus for cpu in cpus if cpu in homes)
        near = live.memory_nodes.intersection(homes.values()) if homes else live.memory_nodes
        yield Domain(live, at, near, isolated, polling, siblings)


@dataclass(frozen=True)
class PinnedCpu:
    """A CPU, and the vCPUs that may run on no other."""

    cpu: int
    vcpus: tuple[str, ...]


def pinned_cpus(scene: Scene) -> Iterator[PinnedCpu]:
    users: dict[int, list[str]] = defaultdict(list)
    for domain in known(scene.live.domains, ()):
        for number, cpus in enumerate(domain.vcpus):
            if len(cpus) == 1:
                users[min(cpus)].append(f"vCPU {number} of {domain.name}")
    yield from (PinnedCpu(cpu, tuple(vcpus)) for cpu, vcpus in sorted(users.items()))
