"""The ports of a proof: plugged by the agent's API, and what their VFs have, read from the kernel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import not_
from types import MappingProxyType
from typing import Any

from netplugin.api.client import Client
from netplugin.api.errors import CapacityExhausted, NetpluginError
from netplugin.api.models import BackendInfo, Network, PortSecurity, PortSpec, Qos, VfInfo, VfOptions
from netplugin.programs.polling import polled
from netplugin_zeroloss.matrix.proof_host import LOOK_S, ProofHost, remaining

#: The run, and the VM of all its ports. Always the same, so that the next proof removes what is left of a
#: killed one, in whatever folder that was.
RUN_ID, VM_ID, BACKEND = "prove", "zeroloss-prove", "sriov"
_VLAN, _OTHER_VLAN, _MBPS = 4001, 4002, 100
#: VFs that are plugged at most, and in how many seconds.
_MOST, _FILL_S = 32, 180.0
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class NotShown(Exception):
    """The host lacks what a step needs."""


class Failed(Exception):
    """What was seen is not what was requested."""


def remove(agent: Client, vm_id: str, seconds: float) -> None:
    """Delete all ports of a VM, also if the agent is just being restarted. Raises: NetpluginError."""

    def refused() -> NetpluginError | None:
        try:
            for port in agent.list_ports(vm_id=vm_id):
                agent.delete_port(port.port_id)
        except NetpluginError as error:
            return error
        return None

    if error := polled(refused, not_, seconds, LOOK_S):
        raise error


def usable(agent: Client, backend: str) -> BackendInfo:
    """Raises: NotShown if the agent cannot use a backend, NetpluginError."""
    info = next((each for each in agent.backends() if each.name == backend), None)
    if info is None or not info.usable:
        raise NotShown(f"the agent cannot use {backend}: {info.reason if info else 'it is not enabled'}")
    return info


def port_of(number: int, backend: str, network: Network, **more: Any) -> tuple[str, PortSpec]:
    """Return id and spec of a port of the proof."""
    own: dict[str, Any] = {"vm_id": VM_ID, "mac": f"52:54:00:5a:02:{number:02x}", "backend": backend}
    return f"{VM_ID}-{number}", PortSpec(**own, network=network, **more)


def free_vfs(agent: Client, network: str) -> tuple[list[VfInfo], set[str]]:
    """Return the VFs of a network, and the addresses of those that no port and nothing else has."""
    there = [vf for vf in agent.list_vfs() if vf.physical_network == network and not vf.left_out]
    return there, {vf.pci_address for vf in there if vf.state == "available"}


def lacking(agent: Client, networks: Sequence[str]) -> tuple[str, int]:
    """Return why not each of these has a VF, and how many others have; empty if each has. One per port."""
    for network, needed in Counter(networks).items():
        there, free = free_vfs(agent, network)
        if len(free) < needed:
            why = f"{needed} VFs are needed on {network}, and {len(free)} of {len(there)} are free"
            return why, len(there) - len(free)
    return "", 0


class VfLedger:
    """Ports with VFs. ``ends``: the networks of the ends; ``seconds``: until VFs are as before."""

    def __init__(self, agent: Client, host: ProofHost, ends: Sequence[Network], seconds: float) -> None:
        self._agent, self._host, self._seconds = agent, host, seconds
        #: Of the first port, and of the second; others have that of the first.
        self._networks = [
            Network(type="vlan", physical_network=end.physical_network, vlan_id=_VLAN, mtu=end.mtu)
            for end in (*ends[:2], *ends[:2])
            if end.physical_network is not None
        ][:2]
        self._before, self._free = dict[str, str](), set[str]()
        #: The VF of each port.
        self._plugged: dict[str, str] = {}

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield what is to be shown, in this order, each with what shows it."""
        trusted = {"port_security": PortSecurity(enabled=False), "vf": VfOptions(trusted=True)}
        yield "MAC, VLAN and spoof check of two ports", self._two
        yield "the same PUT again", self._again
        yield "another VLAN", lambda: self._put(0, vlan=_OTHER_VLAN)
        yield "trust, and no spoof check", lambda: self._put(0, trusted, trusted=True, spoofchk=False)
        yield "a limited rate", self._limited
        yield "one port more than VFs", self._one_more
        yield "VFs that are unplugged", self._unplug

    def _two(self) -> str:
        usable(self._agent, BACKEND)
        names = [network.physical_network or "" for network in self._networks]
        why, _ = lacking(self._agent, names)
        if why or not names:
            raise NotShown(why or "no end is on a physical network")
        self._free = set[str]().union(*(free_vfs(self._agent, name)[1] for name in names))
        self._before = self._host.vf_states()
        return "; ".join(self._put(n, vlan=_VLAN, spoofchk=True, trusted=False) for n in range(2))

    def _again(self) -> str:
        before = self._host.vf_states()
        self._put(0)
        if changed := remaining(before, self._host.vf_states, 0.0):
            raise Failed("; ".join(changed))
        return f"{len(before)} settings of VFs are as before"

    def _limited(self) -> str:
        if not all(pf.link and pf.link.carrier for pf in self._host.look().pfs.values()):
            raise NotShown("a NIC has no carrier, without which no rate is set")
        return self._put(0, {"qos": Qos(egress_kbps=_MBPS * 1000)}, max_mbps=_MBPS)

    def _one_more(self) -> str:
        if not self._free:
            raise NotShown("no port has a VF")
        there, free = free_vfs(self._agent, self._networks[0].physical_network or "")
        if others := len({vf.pci_address for vf in there} - free - set(self._plugged.values())):
            raise NotShown(f"{others} of {len(there)} VFs are not free, and whoever has them may plug more")
        if len(there) > _MOST:
            raise NotShown(f"{len(there)} VFs, and at most {_MOST} are plugged")
        ends = time.monotonic() + _FILL_S
        for number in range(2, 2 + len(free)):
            if time.monotonic() > ends:
                raise NotShown(f"{number} ports were plugged in {_FILL_S:g} s")
            self._put(number)
        try:
            self._put(2 + len(free))
        except CapacityExhausted as error:
            return f"{len(there)} VFs have ports, and for one more: {error.detail}"
        raise Failed(f"one more than {len(there)} was plugged")

    def _unplug(self) -> str:
        remove(self._agent, VM_ID, self._seconds)
        if not self._before:
            raise NotShown("no port had a VF")
        if left := remaining(self._before, self._host.vf_states, self._seconds):
            raise Failed("; ".join(left))
        return f"{len(self._before)} settings of VFs are as before"

    def _put(self, number: int, change: Mapping[str, Any] = _NOTHING, /, **asked: object) -> str:
        """PUT a port, and compare what its VF has with what was requested."""
        if not self._free:
            raise NotShown("no port has a VF")
        network = self._networks[number if number < 2 else 0]
        network = network.model_copy(update={"vlan_id": asked.get("vlan", _VLAN)})
        port_id, spec = port_of(number, BACKEND, network, **change)
        binding = self._agent.put_port(port_id, spec).binding
        vf = str(((binding and binding.model_extra) or {}).get("pci_address"))
        others = {of for name, of in self._plugged.items() if name != port_id}
        if vf not in self._free - others or self._plugged.setdefault(port_id, vf) != vf:
            raise Failed(f"port {number} has VF {vf}, which was not free for it")
        asked, there = {"mac": spec.mac, **asked}, self._host.look().vfs.get(vf)
        seen = there.attributes if there is not None else None
        if (has := {name: getattr(seen, name, "nothing") for name in asked}) != asked:
            raise Failed(f"VF {vf}: {asked} requested, {has} seen")
        return f"VF {vf} has {', '.join(f'{name} {value}' for name, value in has.items())}"
