"""What a proof reads of its host: NICs with their firmware, and all that must be as before at the end."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import not_
from pathlib import Path

from drivers.vf.inventory import Inventory
from drivers.vf.kernel import VfKernel
from drivers.vf.options import By, PoolDevice
from netplugin.api.client import Client
from netplugin.host.links import Links
from netplugin.host.vfs import SYS, Vfs, read_interfaces, read_link, read_text
from netplugin.programs.polling import polled
from netplugin.tuning.facts import OvsLive

#: SIOCETHTOOL of include/uapi/linux/sockios.h; ETHTOOL_GDRVINFO and struct ethtool_drvinfo of ethtool.h.
_ETHTOOL, _DRIVER_INFO, _INFO = 0x8946, 3, struct.Struct("I32s32s32s32s32s12s5I")
#: The devices of OVS's datapaths, which stay when the last bridge has gone.
_DATAPATHS = ("ovs-netdev", "ovs-system")
#: Seconds between two looks.
LOOK_S = 0.5
_FILES = {"vendor": "vendor", "device": "device", "VFs": "sriov_numvfs", "VFs at most": "sriov_totalvfs"}


class ProofHost:
    """Reads the kernel, not the agent. ``nics``: PCI addresses. The methods raise NetpluginError."""

    def __init__(self, nics: Sequence[str], sys: Path = SYS, vfs: Vfs | None = None) -> None:
        self.nics, self._sys, self._links = nics, sys, Links()
        self._kernel = VfKernel([PoolDevice("", nic, By.ADDRESS) for nic in nics], sys, vfs)

    def facts(self, nic: str) -> dict[str, str]:
        """Return what a NIC is, without what tells it from others of its kind; empty: not reported."""
        at = self._sys / "bus/pci/devices" / nic
        found = {name: read_text(at / file).removeprefix("0x") for name, file in _FILES.items()}
        version, firmware = next((driver_info(each.name) for each in read_interfaces(at)), ("", ""))
        driver = {"driver": read_link(at / "driver") or "none", "driver version": version}
        return {"at": nic, **driver, "firmware": firmware, **found}

    def look(self) -> Inventory:
        """Return the NICs that can have VFs, and the VFs."""
        return self._kernel.look()

    def vf_states(self) -> dict[str, str]:
        """Return all of each VF that a port changes. A MAC that the VF's driver chose may be another."""
        states: dict[str, str] = {}
        for address, vf in self.look().vfs.items():
            has: dict[str, object] = asdict(vf.attributes) if vf.attributes is not None else {}
            has |= {"driver": vf.driver, "override": vf.driver_override}
            has |= {"mac": "of its driver"} if any(each.own_mac for each in vf.interfaces) else {}
            states |= {f"VF {address} {name}": str(value) for name, value in has.items()}
        return states

    def state(self, agent: Client, ovs: OvsLive | None) -> dict[str, str]:
        """Return what must be as before at the end, by name."""
        found = {f"NIC {nic} driver": self.facts(nic)["driver"] for nic in self.nics}
        for link in self._links.find(lambda name, *_: name not in _DATAPATHS):
            # The interface of a VF may come back by another name.
            if not (self._sys / "class/net" / link.name / "device/physfn").exists():
                found[f"link {link.name}"] = f"up {link.up}, MTU {link.mtu}, on {link.master}"
        if ovs is not None:
            found |= {f"OVS {port.name}": f"{port.type} on {port.bridge}" for port in ovs.ports}
            found["PMD mask"] = ovs.other_config.get("pmd-cpu-mask", "none")
        ports = {f"port {each.port_id}": each.spec.model_dump_json() for each in agent.list_ports()}
        return found | self.vf_states() | ports


def remaining(before: Mapping[str, str], read: Callable[[], Mapping[str, str]], seconds: float) -> list[str]:
    """Return a clause for each name whose value is another one, and stays so for so many seconds."""

    def differing() -> list[str]:
        now = read()
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        return [f"{n}: {before.get(n, 'absent')} before, {now.get(n, 'absent')} now" for n in names]

    return polled(differing, not_, seconds, LOOK_S)


def driver_info(interface: str) -> tuple[str, str]:
    """Return the versions of driver and firmware as ``ethtool -i`` has them; empty if not reported."""
    answer = ctypes.create_string_buffer(struct.pack("I", _DRIVER_INFO), _INFO.size)
    request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(answer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking, _ETHTOOL, request)
        except OSError:  # its driver has no such request
            return "", ""
    found = _INFO.unpack(answer.raw)
    version, firmware = (each.partition(b"\0")[0].decode(errors="replace") for each in found[2:4])
    return version, firmware
