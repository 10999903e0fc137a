# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""What a NIC and a bond of ZStack become: the mapping that the agent and the plug-in of kvmagent share.

The plug-in (tools/zstack/netplugin_zstack.py) is one file for Python 2.7. `python -m netplugin.docgen`
copies what follows the imports into it, so it is written for Python 2.7 and 3, and the linters of
Python 3 skip it. The tables of docs/zstack.md are generated from it too.
"""

import os
import re

# -- copied from here on --

SYSFS = "/sys"
#: Drivers that leave a NIC to DPDK and take its netdev away.
DPDK_DRIVERS = ("vfio-pci", "uio_pci_generic", "igb_uio")
#: Type of a NIC -> backend.
BACKENDS = {"dpdkvhostuserclient": "dpdkvhostuser", "vDPA": "vdpa"}
#: Modes of dpdk-bond.yaml: numbers of DPDK, names of OVS.
BOND_MODES = {"1": "active-backup", "active-backup": "active-backup", "balance-slb": "balance-slb",
              "4": "lacp", "802.3ad": "lacp", "balance-tcp": "lacp"}
#: Names that ZStack gives its NICs; other ports are never removed by a sync.
NIC_NAME = re.compile(r"vnic\d+\.\d+$")
#: A sync spares a port that was plugged less than this many seconds ago: its VM may not have started.
YOUNG_S = 600
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$")


class MappingError(Exception):
    """A value of ZStack's without a counterpart: its field, and a sentence."""

    def __init__(self, field, text):
        super(MappingError, self).__init__(text)
        self.field, self.text = field, text


def _number(nic, path):
    """The number of a field that ZStack may send as text; None if it has none."""
    value = nic
    for name in path.split("."):
        value = getattr(value, name)
    try:
        return None if value in (None, "") else int(value)
    except ValueError:
        raise MappingError(path, "NIC %s: %s is %r, not a number" % (nic.nicInternalName, path, value))


def _backend(nic):
    if nic.type not in BACKENDS:
        raise MappingError("type", "NIC %s: no backend for the type %s" % (nic.nicInternalName, nic.type))
    return BACKENDS[nic.type]


def _from_domain(nic, path, default, otherwise):
    """A number as kvmagent writes it into the domain, `default` if it has none; `otherwise` is QEMU's own."""
    addon = nic.vHostAddOn
    if nic.driverType != "virtio" or addon is None or addon.queueNum in (None, 1):
        return otherwise
    return _number(nic, path) or default


#: Fields of ZStack, field of the PortSpec, its value from the NIC `n`, the options `o` and the physical
#: network `p`, and what the page says of it.
MAPPING = (
    ("`mac`", "mac", lambda n, o, p: n.mac.lower(), "the same"),
    ("`type`", "backend", lambda n, o, p: _backend(n),
     "`dpdkvhostuserclient`: `dpdkvhostuser`; `vDPA`: `vdpa`; others are refused"),
    ("`nicInternalName`", "port_name", lambda n, o, p: n.nicInternalName, "the same"),
    ("`bridgeName`", "network.physical_network", lambda n, o, p: p,
     "the physical network with this bridge, which must exist"),
    ("`vlanId`", "network.type", lambda n, o, p: "vlan" if _number(n, "vlanId") else "flat",
     "none or 0: `flat`; else `vlan`"),
    ("`vlanId`", "network.vlan_id", lambda n, o, p: _number(n, "vlanId") or None, "the number"),
    ("`mtu`", "network.mtu", lambda n, o, p: _number(n, "mtu"), "the number; none: 1500"),
    ("`vHostAddOn.queueNum`", "queues", lambda n, o, p: _from_domain(n, "vHostAddOn.queueNum", 1, 1),
     "the number where kvmagent writes it into the domain: not 1, with `driverType` `virtio`; else 1"),
    ("`vHostAddOn.rxBufferSize`", "rx_queue_size",
     lambda n, o, p: _from_domain(n, "vHostAddOn.rxBufferSize", 1024, 256),
     "where kvmagent writes `queueNum`: the number, or 1024; else 256, the default of QEMU"),
    ("`vHostAddOn.txBufferSize`", "tx_queue_size",
     lambda n, o, p: _from_domain(n, "vHostAddOn.txBufferSize", 1024, 256), "as `rxBufferSize`"),
    ("`pciDeviceAddress`", "vf.pci_address", lambda n, o, p: n.pciDeviceAddress if n.type == "vDPA" else None,
     "`vDPA` only: this VF; none: one that the agent chooses"),
    ("`cleanTraffic`", "port_security.enabled", lambda n, o, p: bool(n.cleanTraffic) or o.hold_mac,
     "true; without `cleanTraffic` what the option `hold_mac` says"),
    ("`ips`, `cleanTraffic`", "port_security.allowed_addresses",
     lambda n, o, p: [{"ip": ip} for ip in n.ips or () if n.cleanTraffic],
     "the addresses; without `cleanTraffic` none, so that only the MAC address is held"),
    ("`cleanTraffic`", "port_security.roles", lambda n, o, p: [] if n.cleanTraffic else list(o.roles),
     "none; without `cleanTraffic` what the option `roles` says"),
)


def port_spec(vm_uuid, nic, options, physical_network):
    """The PortSpec of a NIC; what has no value is left to the agent's default. Raises: MappingError."""
    spec = {"vm_id": vm_uuid}
    for _, path, value_of, _ in MAPPING:
        value = value_of(nic, options, physical_network)
        if value is not None:
            group, _, field = path.rpartition(".")
            (spec.setdefault(group, {}) if group else spec)[field] = value
    return spec


def pci_address(name, interfaces):
    """The PCI address of a network interface; `interfaces` has that of one which DPDK has taken.

    Raises: MappingError.
    """
    if _PCI.match(name.lower()):
        return name.lower()
    path = os.path.realpath(os.path.join(SYSFS, "class/net", name, "device"))
    found = [part for part in path.split("/") if _PCI.match(part)]
    if found or name in interfaces:
        return found[-1] if found else interfaces[name]
    raise MappingError("physicalInterfaceName",
                       "%s is no PCI network interface of this host. Fix: if DPDK has it, write its PCI "
                       "address into the option interfaces (docs/zstack.md)" % name)


def devices_of(name, interfaces, bond):
    """The devices of an interface, or of its `bond` in dpdk-bond.yaml, and the mode. Raises: MappingError."""
    if bond is None:
        return [pci_address(name, interfaces)], None
    mode = "lacp" if bond.lacp in ("active", "passive") else BOND_MODES.get(str(bond.mode))
    if mode is None:
        text = "bond %s: mode %s is not supported. Fix: use one of %s in dpdk-bond.yaml"
        raise MappingError("mode", text % (name, bond.mode, ", ".join(sorted(BOND_MODES))))
    devices = [pci_address(slave, interfaces) for slave in bond.slaves]
    return devices, mode if len(devices) > 1 else None


def dpdk_has(device):
    """Whether a PCI device is bound to a driver of DPDK; DPDK's virtual devices always are."""
    driver = os.path.realpath(os.path.join(SYSFS, "bus/pci/devices", device, "driver"))
    return not _PCI.match(device) or os.path.basename(driver) in DPDK_DRIVERS


def has_netdev(name):
    return os.path.exists(os.path.join(SYSFS, "class/net", name))


def uplinks(network):
    """The devices that a physical network, as the agent lists it, has in OVS; of a NIC its PCI address."""
    found = []
    for device in (network.get("ovs") or {}).get("devices") or []:
        address = device.partition(",")[0].lower()  # what follows are parameters of the driver
        found.append(address if _PCI.match(address) else device)
    return found


def carries(network, name, interfaces, bond):
    """Whether an interface or bond is an uplink; without netdev and address, by the name of the bridge."""
    try:
        return set(devices_of(name, interfaces, bond)[0]) <= set(uplinks(network))
    except MappingError:
        return not has_netdev(name) and bool(uplinks(network)) and network["bridge"] == "br_" + name


def taken_by_dpdk(name, interfaces, networks):
    """The devices of an interface without netdev that DPDK has; none if it has not all of them."""
    if name in interfaces:
        devices = [interfaces[name]]
    else:
        devices = [d for network in networks if network["bridge"] == "br_" + name for d in uplinks(network)]
    return devices if all(dpdk_has(device) for device in devices) else []


def cpus_of(mask):
    """The CPU list of a mask of PMD threads, such as 0x3c. Raises: MappingError."""
    try:
        number = int(str(mask), 16)
    except ValueError:
        number = 0
    if number <= 0:
        raise MappingError("ovsCpuPinning",
                           "%s is no CPU mask, the CPUs stay. Fix: give one, such as 0x3c" % mask)
    return ",".join(str(cpu) for cpu in range(number.bit_length()) if number >> cpu & 1)
