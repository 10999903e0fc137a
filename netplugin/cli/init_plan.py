"""The plan of ``netplugin init`` (pure): the options that flags set, the new file, what the host lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from oslo_config import types

from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import valid
from netplugin.api.fields import NAME_PATTERN, PATTERN_WORDS
from netplugin.api.physical_models import PhysicalNetworkSpec, identity_of
from netplugin.host.physical_networks import bridge_of
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.root import known

#: Debian's vswitchd with DPDK, an alternative of ``ovs-vswitchd``.
OVS_DPDK = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"
#: A value of ``dpdk-devargs``, as opposed to an interface of the kernel.
_OF_DPDK = re.compile(r"[0-9A-Fa-f]{4}:|class=|net_|eth_|virtio_user")
_FLAGS = {"ovs": "--uplink", "linuxbridge": "--uplink", "sriov": "--vf-device", "bridge": "--bridge"}
_LIST = types.List(item_type=types.String(quotes=True))
#: What is missing, and the commands for it.
Step = tuple[str, Sequence[str]]


#: Group and name of an option, its entries, the flag that sets them, the network that they belong to, and if
#: they are only a default. Those of a network are set once; without a network they are added.
Setting = tuple[str, str, Sequence[str], str, str, bool]


def refused(flag: str, message: str, fix: str) -> InvalidRequest:
    return InvalidRequest.of_field(flag, message, step="init", fix=f"{fix}. Nothing was changed")


def spec_of(
    backends: Sequence[str], network: str, bridge: str | None, uplinks: Sequence[str], vfs: Sequence[str]
) -> PhysicalNetworkSpec:
    """The network of the flags, for these backends. Raises: InvalidRequest naming the flag."""
    dpdk = [uplink for uplink in uplinks if _OF_DPDK.match(uplink)]
    links = [uplink for uplink in uplinks if uplink not in dpdk]
    on_ovs, linux = not {"dpdkvhostuser", "vdpa"}.isdisjoint(backends), "linuxbridge" in backends
    address = "name its PCI address (ls -l /sys/class/net/*/device), or add --backend linuxbridge"
    unnamed = not re.fullmatch(NAME_PATTERN, network)
    for wrong, flag, message, fix in (
        (unnamed, "--physical-network", PATTERN_WORDS[NAME_PATTERN], "name it like physnet1"),
        (dpdk and not on_ovs, "--uplink", f"{dpdk} is for OVS-DPDK", "name an interface"),
        (links and not linux, "--uplink", f"{links} is no device of OVS-DPDK", address),
        (len(links) > 1, "--uplink", "a Linux bridge has one interface", "make a bond, and name it"),
        ("sriov" in backends and not vfs, "--vf-device", "is required for sriov", "name a NIC with VFs"),
        (bridge and not on_ovs, "--bridge", "is that of OVS-DPDK, which no backend uses", "leave it away"),
    ):
        if wrong:
            raise refused(flag, message, fix)
    parts: dict[str, Any] = {"bridge": bridge}
    parts |= {"ovs": {"devices": dpdk}} if on_ovs else {}
    parts |= {"linuxbridge": {"interface": links[0] if links else None}} if linux else {}
    parts |= {"sriov": {"devices": vfs}} if vfs else {}
    try:
        return valid(PhysicalNetworkSpec, parts)
    except InvalidRequest as invalid:
        found = invalid.errors[0]
        raise refused(_FLAGS[found.field.partition(".")[0]], found.message, "correct it") from None


def check_free(spec: PhysicalNetworkSpec, used: Collection[str]) -> None:
    """Raises: InvalidRequest for an uplink among the ``used`` interfaces and PCI addresses."""
    interface = spec.linuxbridge.interface if spec.linuxbridge else None
    for uplink in (*map(identity_of, spec.ovs.devices if spec.ovs else ()), interface):
        if uplink in used:
            message = f"{uplink} carries this host's default route or an SSH session"
            raise refused("--uplink", message, "name another NIC; or repeat it with --allow-in-use")


def settings(backends: Sequence[str], name: str, spec: PhysicalNetworkSpec) -> Iterator[Setting]:
    """The options that these flags set."""
    yield "agent", "enabled_backends", backends, "--backend", "", False
    if spec.ovs:
        bridge, devices = f"{name}:{bridge_of(name, spec)}", [f"{name}:{each}" for each in spec.ovs.devices]
        yield "ovs", "bridge_mappings", [bridge], "--bridge", name, spec.bridge is None
        yield "ovs", "uplinks", devices, "--uplink", name, not devices
    if spec.linuxbridge:
        entry = f"{name}:{spec.linuxbridge.interface or ''}"
        yield "linuxbridge", "physical_interfaces", [entry], "--uplink", name, entry.endswith(":")
    if spec.sriov:
        yield (
            "sriov",
            "devices",
            [f"{name}:{each}" for each in spec.sriov.devices],
            "--vf-device",
            name,
            False,
        )


def edited(text: str, changes: Iterable[Setting]) -> str:
    """The file with these options; its other lines stay. Raises: InvalidRequest naming the flag."""
    for group, option, entries, flag, network, is_default in changes:
        start, end, value = _place(text, group, option)
        try:
            found = _LIST(value)
        except ValueError as wrong:
            where = f"[{group}] {option} of the file cannot be read: {wrong}"
            raise refused("--config-file", where, "correct the file") from None
        new = [entry for entry in entries if entry not in found]
        of_network = [e for e in found if network and e.partition(":")[0].strip() == network]
        if not new or (of_network and is_default):
            continue
        if of_network:
            has = f"{','.join(new)}: the file has [{group}] {option} = {','.join(of_network)}"
            raise refused(flag, has, "delete the ports there, and change the file by hand")
        # As [ovs] uplinks says: entries with commas in double quotes, and then the whole in single ones.
        value = ",".join(f'"{entry}"' if "," in entry else entry for entry in (*found, *new))
        line = f"{option} = '{value}'\n" if '"' in value else f"{option} = {value}\n"
        before = text if start is None else text[:start]
        between = "" if before.endswith("\n") or not before else "\n"
        head = f"\n[{group}]\n" if start is None else ""
        text = before + between + head + line + text[end:]
    return text


def _place(text: str, group: str, option: str) -> tuple[int | None, int, str]:
    """Where an option is in a file, as oslo.config's iniparser.py reads it, and its value.

    Without it: the place after its comment, or after the head of its section; None without that."""
    assigned = rf"^{option.replace('_', '[-_]')}[ \t]*[=:](.*(?:\n[ \t]+\S.*)*)\n?"
    for pattern in (assigned, rf"^[#;] ?{option} =.*\n?()", r"\A.*\n?()"):
        place = 0
        best: tuple[int | None, int, str] | None = None
        for section in re.split(r"^(?=\[)", text, flags=re.MULTILINE):
            if section.lower().startswith(f"[{group}]"):
                for found in re.finditer(pattern, section, re.MULTILINE):
                    value = "\n".join(line.strip() for line in found[1].split("\n"))
                    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
                    start = place + (found.start() if pattern is assigned else found.end())
                    best = start, place + found.end(), value[1:-1] if is_quoted else value
            place += len(section)
        if best:
            return best
    return None, len(text), ""


def missing(
    spec: PhysicalNetworkSpec, facts: Facts, live: Live, debian: bool, has_ovs: bool
) -> Iterator[Step]:
    """What the host still lacks for the first port of this network, in the order to do it."""
    interface = spec.linuxbridge.interface if spec.linuxbridge else None
    if any(each.name == interface and each.state == "down" for each in known(facts.network.interfaces, ())):
        yield f"{interface} is down", [f"ip link set {interface} up"]
    if spec.ovs is None:
        return
    pools = known(facts.memory.pools, ())
    if pools and not any(known(pool.total, 0) for pool in pools):
        path = min(pools, key=lambda pool: (pool.size_kb, pool.node)).path
        yield "there are no hugepages (for good: on the kernel command line)", [f"echo 1024 > {path}"]
    ovs = known(live.ovs, None)
    if not has_ovs:
        package = "apt-get install openvswitch-switch-dpdk" if debian else "dnf install openvswitch"
        yield "Open vSwitch with DPDK is not installed", [package]
    if ovs is None or not ovs.dpdk_initialized:
        choose = [f"update-alternatives --set ovs-vswitchd {OVS_DPDK}"] if debian else []
        keys = "other_config:dpdk-init=true other_config:dpdk-socket-mem=1024"
        restart = f"systemctl restart {'openvswitch-switch' if debian else 'openvswitch'}"
        commands = [*choose, f"ovs-vsctl --no-wait set Open_vSwitch . {keys}", restart]
        yield f"Open vSwitch {'runs without' if ovs else 'does not run with'} DPDK", commands
