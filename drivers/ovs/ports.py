"""The desired OVSDB rows of the ports of VMs, with their policers, derived from the intent alone."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from drivers.ovs.sockets import is_chosen
from netplugin.api.models import PortSpec
from netplugin.backend import Claim, Intent, Overlay
from netplugin.host.names import VHOST, device_name
from netplugin.host.ovs_rows import (
    BACKEND_MARK,
    IFINDEX_MARK,
    INTERNAL_TYPE,
    MAC_MARK,
    MAPPING_MARK,
    MTU_MARK,
    NETWORK_MARK,
    PORT_MARK,
    STORE_MARK,
    UDP_MARK,
    VF_PORT_MARK,
    VM_ID,
    OvsPort,
)

#: The interface type for which QEMU creates the socket and OVS connects to it.
VHOST_TYPE = "dpdkvhostuserclient"
#: The interface type of a device of the host, which the userspace datapath opens by AF_PACKET.
SERVICE_TYPE = ""
#: The number of queues configured for the VM; the guest decides how many it uses.
QUEUES_MARK = "netplugin-queues"


class PortRows(ABC):
    """A port as its rows. Values have the form of the database: an optional column is a list."""

    #: What ``Change.describe`` calls it.
    kind: ClassVar[str] = "port"
    #: Map columns in which other keys are kept.
    merged: ClassVar[Collection[str]] = ("external_ids",)
    #: The mark of a port that several backends share: another one may have added it already.
    shared_mark: ClassVar[str] = ""

    @abstractmethod
    def port_columns(self) -> dict[str, Any]:
        """The columns of Port."""

    @abstractmethod
    def interfaces(self, *, is_new: bool = False) -> dict[str, dict[str, Any]]:
        """The columns of each Interface by name; ``is_new``: with those that are set only when it is made."""

    def qos_columns(self) -> dict[str, Any] | None:
        """The columns of its QoS row; None: it has none."""
        return None

    def awaited_mtu(self, *, is_new: bool) -> int | None:
        """The MTU for which to wait after the port was added (``is_new``) or set; None: for none."""
        return None

    @abstractmethod
    def summary(self, *, is_new: bool) -> str:
        """What ``Change.describe`` says of its attributes."""

    def differs(self, row: OvsPort) -> bool:
        """Whether a column that can be changed live differs."""
        found = {interface.name: interface for interface in row.interfaces}
        interfaces = self.interfaces()
        return (
            found.keys() != interfaces.keys()
            or self._columns_differ(row, self.port_columns())
            or any(self._columns_differ(found[name], columns) for name, columns in interfaces.items())
        )

    def _columns_differ(self, row: object, columns: Mapping[str, Any]) -> bool:
        for column, desired in columns.items():
            found = getattr(row, column)
            if column in self.merged:
                if any(found.get(key) != value for key, value in desired.items()):
                    return True
            elif isinstance(desired, list):
                if found != (desired[0] if desired else None):
                    return True
            elif found != desired:
                return True
        return False


_QOS_TYPE = "egress-policer"

# vswitch.xml, ingress_policing_burst: a burst "numerically at least as large as 80% of" the rate
# "helps TCP come closer to achieving the full rate", and "should be at least the size of the MTU".
_BURST_TENTHS = 8
_LEAST_FRAMES = 4
# A policer counts a segment before segmentation (netdev_dpdk_srtcm_policer_pkt_handle): a segment
# larger than the burst would never pass.
_LARGEST_SEGMENT = 65535


@dataclass(frozen=True)
class Policer:
    """A token bucket: rate in kbit/s (1000 bit/s) and burst in kbit."""

    kbps: int
    burst_kbit: int

    @staticmethod
    def of(kbps: int | None, mtu: int, tso: bool) -> Policer | None:
        """The policer for a rate in kbit/s; None for no limit."""
        if kbps is None:
            return None
        least = max(_LEAST_FRAMES * mtu, _LARGEST_SEGMENT if tso else 0)
        return Policer(kbps, max(-(-kbps * _BURST_TENTHS // 10), -(-least * 8 // 1000)))

    def qos_columns(self) -> dict[str, Any]:
        """The columns of a QoS row, in bytes (vswitch.xml, egress-policer)."""
        return {"type": _QOS_TYPE, "other_config": self.other_config}

    @property
    def other_config(self) -> dict[str, str]:
        """The committed information rate and burst size."""
        return {"cir": str(self.kbps * 1000 // 8), "cbs": str(self.burst_kbit * 1000 // 8)}


_SHOWN = re.compile(r"^(cir|cbs): (\d+)$", re.MULTILINE)


def policer_refused(shown: str, desired: Policer | None) -> str | None:
    """Compare with ``ovs-appctl qos/show <interface>``: the difference, or None if it is as requested.

    vswitchd reports a refused policer only in its log, so this output is the only way to detect it.
    """
    found: Mapping[str, str] = dict(_SHOWN.findall(shown))
    expected = desired.other_config if desired else {}
    if found == expected:
        return None
    return f"vswitchd did not take the policer {expected or 'away'}, it has {found or 'none'}"


@dataclass(frozen=True)
class RelayVfPort(PortRows):
    """The relay VF of a VM's port: a DPDK port on the same bridge that takes all of its frames."""

    backend: str
    port_id: str
    name: str
    bridge: str
    #: The PCI address for ``dpdk-devargs``.
    device: str
    mtu: int
    queues: int
    #: The MAC with which OVS must have opened it, where that is not the VM's and matters.
    opened_with: str = ""

    def summary(self, *, is_new: bool) -> str:
        return f"{self.device}, MTU {self.mtu}"

    def awaited_mtu(self, *, is_new: bool) -> int | None:
        return self.mtu

    def port_columns(self) -> dict[str, Any]:
        return {"external_ids": {VF_PORT_MARK: self.port_id, BACKEND_MARK: self.backend}}

    def interfaces(self, *, is_new: bool = False) -> dict[str, dict[str, Any]]:
        """The columns of Interface. OVS uses a device with fewer receive queues with those that it has."""
        ids = {VF_PORT_MARK: self.port_id} | ({MAC_MARK: self.opened_with} if self.opened_with else {})
        columns = {
            "type": "dpdk",
            "options": {"dpdk-devargs": self.device, "n_rxq": str(self.queues)},
            "mtu_request": [self.mtu],
            "external_ids": ids,
        }
        return {self.name: columns}

    def must_be_remade(self, row: OvsPort) -> bool:
        """Whether it must be deleted and added again: OVS opens the VF then, with the MAC that it has."""
        if cannot_become(row, self.bridge, "dpdk", {"dpdk-devargs": self.device}) or row.interface is None:
            return True
        return row.interface.external_ids.get(MAC_MARK, "") != self.opened_with


@dataclass(frozen=True)
class VhostPort(PortRows):
    """A VM's port as OVS should have it: its rows, the spec for its flows, and its relay VF port."""

    backend: str
    port_id: str
    spec: PortSpec
    bridge: str
    tag: int
    socket: str
    type: str
    options: Mapping[str, str]
    #: The rate limits: ``sends`` polices what OVS receives from the VM, ``receives`` the opposite.
    sends: Policer | None = None
    receives: Policer | None = None
    #: The VXLAN network of the port.
    overlay: Overlay | None = None
    #: The mark of the store; empty: keep the mark that is there.
    stamp: str = ""
    vf_port: RelayVfPort | None = None
    #: The index of a service port's device when the port is added; None otherwise.
    ifindex: int | None = None
    #: Whether OVS must reopen the relay VF although its row is correct.
    reopen: bool = False
    #: The claim on the path of its socket, if the caller chose the path.
    chosen: Claim | None = None
    #: Whether nothing is forwarded from or to it.
    closed: bool = False
    #: Whether it is announced at the request of the host that its VM leaves.
    follows: bool = False
    #: The physical network to mark it with, on a bridge that has no mark (``placing.on_bridge``).
    mapped_network: str = ""

    @staticmethod
    def of(backend: str, intent: Intent, bridge: str, tag: int, *, socket: str, tso: bool) -> VhostPort:
        """The port for an intent. ``tso``: the VM may send segments of 64 KiB."""
        spec, overlay = intent.spec, intent.overlay
        assert spec is not None and (overlay is None) == (spec.overlay_id is None)
        is_service = spec.device is not None
        service_type = INTERNAL_TYPE if spec.internal else SERVICE_TYPE
        return VhostPort(
            backend=backend,
            port_id=intent.port_id,
            spec=spec,
            bridge=bridge,
            tag=tag,
            socket=socket,
            type=service_type if is_service else VHOST_TYPE,
            options={} if is_service else {"vhost-server-path": socket},
            sends=Policer.of(spec.qos.egress_kbps, spec.network.mtu, tso),
            receives=Policer.of(spec.qos.ingress_kbps, spec.network.mtu, tso),
            overlay=overlay,
            stamp=intent.stamp,
            chosen=next(filter(is_chosen, intent.claims), None),
            closed=intent.closed,
            follows=intent.follows_guest,
        )

    @property
    def name(self) -> str:
        return port_name(self.port_id, self.spec)

    @property
    def mtu(self) -> int:
        return self.spec.network.mtu

    @property
    def opened(self) -> str | None:
        """The device of the host that OVS opens for a service port."""
        return None if self.spec.internal else self.spec.device

    def summary(self, *, is_new: bool) -> str:
        rate = f", sends {self.sends.kbps} kbit/s" if self.sends else ""
        return f"tag {self.tag}, MTU {self.mtu}{rate}"

    def awaited_mtu(self, *, is_new: bool) -> int | None:
        return None if is_new or self.spec.device else self.mtu

    def port_columns(self) -> dict[str, Any]:
        """The columns of Port: an access port. A flat port has tag 0; without a tag it is a trunk."""
        ids = {PORT_MARK: self.port_id, BACKEND_MARK: self.backend}
        if self.overlay is not None:
            ids |= {NETWORK_MARK: self.overlay.network_id, UDP_MARK: str(self.overlay.spec.udp_port)}
        if self.mapped_network:
            ids[MAPPING_MARK] = f"{self.mapped_network}:{self.bridge}"
        if self.stamp:
            ids[STORE_MARK] = self.stamp
        return {"tag": [self.tag], "vlan_mode": ["access"], "external_ids": ids}

    def interfaces(self, *, is_new: bool = False) -> dict[str, dict[str, Any]]:
        """With the external ids of OVS's integration guide."""
        ids = {"iface-id": self.port_id, "attached-mac": self.spec.mac, PORT_MARK: self.port_id}
        if self.opened:
            ids[MTU_MARK] = str(self.mtu)
            ids |= {} if self.ifindex is None else {IFINDEX_MARK: str(self.ifindex)}
        elif not self.spec.device:
            # kvmagent reads the first, others vm-uuid.
            ids |= dict.fromkeys((VM_ID, "vm-uuid"), self.spec.vm_id)
            ids[QUEUES_MARK] = str(self.spec.queues)
        columns = {
            "type": self.type,
            "options": dict(self.options),
            "mtu_request": [] if self.opened else [self.mtu],
            "ingress_policing_rate": self.sends.kbps if self.sends else 0,
            "ingress_policing_burst": self.sends.burst_kbit if self.sends else 0,
            "external_ids": ids,
        }
        return {self.name: columns}

    def qos_columns(self) -> dict[str, Any] | None:
        """The columns of the QoS row that limits what the VM receives; None: no limit."""
        if self.receives is None:
            return None
        ids = {PORT_MARK: self.port_id, BACKEND_MARK: self.backend}
        return {**self.receives.qos_columns(), "external_ids": ids}

    def must_be_remade(self, row: OvsPort) -> bool:
        """Whether the port must be deleted and added again, because OVS cannot change it live."""
        is_another = row.interface is not None and bool(row.interface.other_ifindex)
        return is_another or row.name != self.name or cannot_become(row, self.bridge, self.type, self.options)

    def qos_differs(self, row: OvsPort) -> bool:
        columns = self.qos_columns()
        if row.qos is None or columns is None:
            return (row.qos is None) != (columns is None)
        return any(getattr(row.qos, column) != value for column, value in columns.items())


def access_vlan(intent: Intent) -> int:
    """The tag of a port on the bridge of its network; a flat port has 0."""
    assert intent.spec is not None
    return intent.overlay.local_vlan if intent.overlay else intent.spec.network.vlan_id or 0


def port_name(port_id: str, spec: PortSpec) -> str:
    """The name of a port in OVS."""
    return spec.device or spec.port_name or device_name(VHOST, port_id)


def is_marked(external_ids: Mapping[str, str], backend: str) -> bool:
    """Whether a row is marked as a port of this backend."""
    return PORT_MARK in external_ids and external_ids.get(BACKEND_MARK) == backend


def cannot_become(row: OvsPort, bridge: str, kind: str, options: Mapping[str, str]) -> bool:
    """Whether a live port cannot get this bridge, type and options."""
    interface = row.interface
    return (
        interface is None
        or row.bridge != bridge
        or interface.type != kind
        or any(interface.options.get(name) != value for name, value in options.items())
    )
