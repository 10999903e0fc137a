"""A plug-in of ZStack's host agent (kvmagent, Python 2.7): its OVS-DPDK calls go to the netplugin agent.

kvmagent loads it from kvmagent/plugins. It replaces `ovs.getOvsCtl` and `ovs.OvsDpdkCtl`, through which
kvmagent plugs NICs, makes bridges and joins its DHCP servers to them. A method returns what kvmagent
expects, or raises `PluginError` with the sentence of the netplugin agent; it never returns None or -1,
which kvmagent would take for a NIC to pass through. Options: /etc/netplugin/zstack.conf; docs/zstack.md.
"""

import glob
import json
import os
import re
import socket
import threading
import time

try:
    import httplib
    from ConfigParser import Error as ConfigError, RawConfigParser
    from urllib import quote
except ImportError:  # Python 3
    import http.client as httplib
    from configparser import Error as ConfigError, RawConfigParser
    from urllib.parse import quote

from zstacklib.utils import log, ovs

CONFIG = "/etc/netplugin/zstack.conf"
#: Our service ports: this prefix and the name of the device.
SERVICE = "zstack-"

logger = log.get_logger(__name__)
# Loaded once more, it finds itself there.
original_ctl = getattr(ovs.OvsDpdkCtl, "original", ovs.OvsDpdkCtl)
original_get_ctl = getattr(ovs.getOvsCtl, "original", ovs.getOvsCtl)


class PluginError(Exception):
    """What failed, why, and what to do. Not an OvsError: kvmagent logs those and goes on."""

    def __init__(self, text):
        # Python 2: str() of the error must not fail on a letter beyond ASCII.
        super(PluginError, self).__init__(text if isinstance(text, str) else text.encode("utf-8"))


#: The options of section [zstack]: name, default, meaning.
OPTIONS = (
    ("socket", "/run/netplugin/agent.sock", "UNIX socket of the netplugin agent"),
    ("deadline", "45", "seconds for all calls of a method; more than 10 above the agent's `operation_timeout`"),
    ("sync_deadline", "300", "the same for a sync, which has all NICs of the host"),
    ("mtu", "1500", "MTU of the bridges that ZStack makes; kvmagent passes none on"),
    ("hold_mac", "yes", "`no`: a NIC without `cleanTraffic` may send from any MAC address"),
    ("roles", "", "`router`, `dhcp_server` or both, for NICs without `cleanTraffic`, as VPC routers need"),
)


class Options(object):
    """The options of the file, which need not be there; an unknown one is an error."""

    def __init__(self, path):
        parser = RawConfigParser()
        parser.optionxform = str
        values = dict((name, default) for name, default, _ in OPTIONS)
        try:
            parser.read(path)
            tables = dict((section, dict(parser.items(section))) for section in parser.sections())
            given = tables.pop("zstack", {})
            self.interfaces, vlans = tables.pop("interfaces", {}), tables.pop("vlans", {})
            unknown = sorted(set(given) - set(values)) + sorted(tables)
            if unknown:
                raise ValueError("nothing has the name %s" % unknown[0])
            values.update(given)
            self.socket = values["socket"]
            self.deadline, self.sync_deadline = float(values["deadline"]), float(values["sync_deadline"])
            self.mtu = int(values["mtu"])
            self.hold_mac = {"yes": True, "no": False}[values["hold_mac"]]
            self.roles = values["roles"].replace(",", " ").split()
            self.vlans = dict((bridge, int(vlan)) for bridge, vlan in vlans.items())
        except (ConfigError, ValueError, KeyError) as error:
            raise PluginError("%s is not valid: %s. Fix: correct it (docs/zstack.md)" % (path, error))


# What a NIC and a bond of ZStack become. docs/zstack.md has the same tables, which its test compares.

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


def _number(nic, path):
    """The number of a field that ZStack may send as text; None if it has none."""
    value = nic
    for name in path.split("."):
        value = getattr(value, name)
    try:
        return None if value in (None, "") else int(value)
    except ValueError:
        raise PluginError("NIC %s: %s is %r, not a number" % (nic.nicInternalName, path, value))


def _backend(nic):
    if nic.type not in BACKENDS:
        raise PluginError("NIC %s: no backend for the type %s" % (nic.nicInternalName, nic.type))
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
    """The PortSpec of a NIC; what has no value is left to the agent's default. Raises: PluginError."""
    spec = {"vm_id": vm_uuid}
    for _, path, value_of, _ in MAPPING:
        value = value_of(nic, options, physical_network)
        if value is not None:
            group, _, field = path.rpartition(".")
            (spec.setdefault(group, {}) if group else spec)[field] = value
    return spec


def pci_address(name, interfaces):
    """The PCI address of a network interface; `interfaces` has that of one which DPDK has taken.

    Raises: PluginError.
    """
    if _PCI.match(name.lower()):
        return name.lower()
    path = os.path.realpath(os.path.join(SYSFS, "class/net", name, "device"))
    found = [part for part in path.split("/") if _PCI.match(part)]
    if found or name in interfaces:
        return found[-1] if found else interfaces[name]
    raise PluginError("%s is no PCI network interface of this host. Fix: if DPDK has it, write its PCI "
                      "address into the option interfaces (docs/zstack.md)" % name)


def devices_of(name, interfaces):
    """The devices of an interface or of a bond in dpdk-bond.yaml, and the bond's mode. Raises: PluginError."""
    bond = original_ctl.getBondFromFile(name)
    if bond is None:
        return [pci_address(name, interfaces)], None
    mode = "lacp" if bond.lacp in ("active", "passive") else BOND_MODES.get(str(bond.mode))
    if mode is None:
        text = "bond %s: mode %s is not supported. Fix: use one of %s in dpdk-bond.yaml"
        raise PluginError(text % (name, bond.mode, ", ".join(sorted(BOND_MODES))))
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


def carries(network, name, interfaces):
    """Whether an interface or bond is an uplink; without netdev and address, by the name of the bridge."""
    try:
        return set(devices_of(name, interfaces)[0]) <= set(uplinks(network))
    except PluginError:
        return not has_netdev(name) and bool(uplinks(network)) and network["bridge"] == "br_" + name


def taken_by_dpdk(name, interfaces, networks):
    """The devices of an interface without netdev that DPDK has; none if it has not all of them."""
    if name in interfaces:
        devices = [interfaces[name]]
    else:
        devices = [d for network in networks if network["bridge"] == "br_" + name for d in uplinks(network)]
    return devices if all(dpdk_has(device) for device in devices) else []


def cpus_of(mask):
    """The CPU list of a mask of PMD threads, such as 0x3c. Raises: PluginError."""
    try:
        number = int(str(mask), 16)
    except ValueError:
        number = 0
    if number <= 0:
        raise PluginError("%s is no CPU mask, the CPUs stay. Fix: give one, such as 0x3c" % mask)
    return ",".join(str(cpu) for cpu in range(number.bit_length()) if number >> cpu & 1)


class _UnixConnection(httplib.HTTPConnection):
    #: The same connection once more: httplib drops its own before it has read all of an answer.
    twin = None

    def __init__(self, path, timeout):
        httplib.HTTPConnection.__init__(self, "localhost", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.twin = socket.fromfd(self.sock.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)

    def cut(self):
        """End a call that waits: the timeout of a socket begins again with each byte that comes."""
        try:
            self.twin.shutdown(socket.SHUT_RDWR)
        except (AttributeError, socket.error):
            pass  # not connected yet, or no longer


def _now():
    """Seconds from a clock that nobody sets; Python 2 has no time.monotonic."""
    return os.times()[4]


def sentence(problem):
    """What failed, which fields, and what to do, of the agent's error document."""
    text = problem.get("detail") or problem.get("title") or "unknown error"
    for error in problem.get("errors") or ():
        field = "%s: %s" % (error["field"], error["message"])
        if field not in text:
            text += ". " + field
    fix = problem.get("fix")
    if problem.get("step") == "mtu":
        fix = "set [zstack] mtu in %s before ZStack makes the bridge; now: %s" % (CONFIG, fix)
    return "%s. Fix: %s" % (text, fix) if fix else text


class Agent(object):
    """Calls of the netplugin agent that end, all together, within one deadline."""

    def __init__(self, sync=False):
        self.options = Options(CONFIG)
        self._deadline_s = self.options.sync_deadline if sync else self.options.deadline
        self._until = _now() + self._deadline_s

    def call(self, method, kind, name=None, body=None):
        """The JSON document that the agent answers; None if it answers none.

        Raises:
            PluginError: the agent's error, or it cannot be reached, or the deadline has passed.
        """
        path = "/v1/" + kind + ("" if name is None else "/" + quote(str(name), safe=""))
        while True:
            status, headers, data = self._exchange(method, path, body)
            try:
                document = json.loads(data.decode("utf-8")) if data else None
                if status < 300:
                    return document
                problem = dict(document)
            except (TypeError, ValueError):  # not the agent's: a proxy, or another program at the socket
                problem = {"detail": "%s %s is answered with status %d" % (method, path, status)}
            wait_s = float(headers.get("retry-after") or 1)
            if problem.get("code") != "overloaded" or _now() + wait_s >= self._until:
                raise PluginError(sentence(problem))
            time.sleep(wait_s)

    def _exchange(self, method, path, body):
        left = self._until - _now()
        connection = _UnixConnection(self.options.socket, left)
        timer = threading.Timer(left, connection.cut)
        timer.daemon = True
        timer.start()
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
            response = connection.getresponse()
            headers = dict((name.lower(), value) for name, value in response.getheaders())
            return response.status, headers, response.read()
        except (socket.error, ValueError, httplib.HTTPException) as error:
            if self._until - _now() <= 0.05:  # of two clocks; a negative timeout is a ValueError
                raise PluginError(
                    "the netplugin agent has not answered %s %s within %g s, and may still complete it. "
                    "Fix: see journalctl -u netplugin-agent, try again" % (method, path, self._deadline_s)
                )
            raise PluginError(
                "the netplugin agent does not answer at %s (%s). Fix: systemctl status netplugin-agent"
                % (self.options.socket, error or type(error).__name__)
            )
        finally:
            timer.cancel()
            connection.close()
            if connection.twin is not None:
                connection.twin.close()

    def delete_ports(self, names):
        """Delete ports in one call; the sentences of what failed."""
        answer = self.call("POST", "ports:batch", body={"delete": names}) if names else {"results": []}
        failed = [result for result in answer["results"] if result["status"] >= 400]
        return ["%s: %s" % (result["port_id"], sentence(result.get("error") or {})) for result in failed]

    def networks(self, bridge=None):
        """The physical networks that have a bridge of OVS, or that have this one."""
        found = [n for n in self.call("GET", "physical-networks") if n.get("bridge") and n.get("ovs")]
        return [network for network in found if bridge in (None, network["bridge"])]

    def network(self, bridge):
        """The physical network of a bridge. Raises: PluginError: there is none."""
        for network in self.networks(bridge):
            return network
        raise PluginError("no physical network has the bridge %s. Fix: attach the L2 network to the host "
                          "again, or put the bridge into [ovs] bridge_mappings" % bridge)

    def services(self, network):
        """The devices of our service ports on a physical network."""
        found = []
        for port in self.call("GET", "service-ports"):
            spec = port["spec"]
            on = spec["network"].get("physical_network") == network["name"]
            if on and port["port_id"] == SERVICE + spec["device"]:
                found.append(str(spec["device"]))
        return found

    def require(self, backend):
        """Raise the agent's reason if it cannot use a backend now."""
        for found in self.call("GET", "backends"):
            if found["name"] == backend:
                if found["usable"]:
                    return
                detail = "%s: %s" % (backend, found["reason"])
                raise PluginError(sentence({"detail": detail, "fix": found.get("fix")}))
        raise PluginError("the netplugin agent has no backend %s. Fix: [agent] enabled_backends" % backend)


class OvsCtl(object):
    """What kvmagent uses of its OvsDpdkCtl, with the names and the answers of that."""

    original = original_ctl
    #: NIC -> path of its socket and when it was plugged, in this process.
    plugged = {}
    #: In place of kvmagent's object for the processes of OVS.
    ovs = property(lambda self: self)

    def isOvsProcRunning(self, procName=None):
        """True, or an error with the reason: to a False kvmagent adds none."""
        Agent().require("dpdkvhostuser")
        return True

    def createNicBackend(self, vmUuid, nic):
        """Plug a NIC and return the path of its vhost-user socket; the same NIC again: the same path."""
        agent = Agent()
        port = self._put(agent, agent.network(nic.bridgeName), vmUuid, nic)
        path = _socket_path(port)
        if not path:
            raise PluginError("port %s is %s, without a socket" % (nic.nicInternalName, port["state"]))
        if port.get("error"):
            logger.warn("port %s is %s: %s" % (nic.nicInternalName, port["state"], sentence(port["error"])))
        self.plugged[nic.nicInternalName] = (path, _now())
        return path

    def destoryNicBackend(self, vmUuid, nicInternalName=None):
        """Unplug a NIC and return the path of its socket; without a name all of the VM, and return ''."""
        agent = Agent()
        ports = agent.call("GET", "ports?vm_id=" + quote(vmUuid, safe=""))
        ports = [p for p in ports if _is_ours(p) and nicInternalName in (None, p["port_id"])]
        _raise_if(agent.delete_ports([port["port_id"] for port in ports]), "VM " + vmUuid)
        if nicInternalName is None:
            return ""
        # kvmagent tries three times to detach, and needs the path each time.
        return _socket_path(ports[0]) if ports else self.plugged.get(nicInternalName, ("", 0))[0]

    destoryNicBackendNoWait = destoryNicBackend

    def listBrs(self, *args):
        return [str(network["bridge"]) for network in Agent().networks()]

    def listPorts(self, bridge, *args):
        """The NICs and service devices on a bridge, and its uplinks by all their names."""
        agent = Agent()
        network = agent.network(bridge)
        names = set(agent.options.interfaces) | set(bond.name for bond in ovs.getAllBondFromFile())
        names.add(bridge[len("br_"):])
        for device in uplinks(network):
            netdevs = glob.glob(os.path.join(SYSFS, "bus/pci/devices", device, "net/*"))
            names |= set(os.path.basename(netdev) for netdev in netdevs)
        found = [name for name in sorted(names) if carries(network, name, agent.options.interfaces)]
        found += [str(port["port_id"]) for port in agent.call("GET", "ports") if _is_ours(port, network)]
        return found + agent.services(network)

    def prepareBridge(self, interface, bridge):
        """Make the physical network of a bridge, or check that it has this uplink; 0."""
        self._prepared(Agent(), interface, bridge)
        return 0

    def prepareDeleteBr(self, bridge):
        """Remove the physical network of a bridge, and our service ports on it; 0."""
        agent = Agent()
        for network in agent.networks(bridge):
            for device in agent.services(network):
                agent.call("DELETE", "service-ports", SERVICE + device)
            agent.call("DELETE", "physical-networks", network["name"])
        return 0

    def addOuterToBridge(self, bridge, veth):
        """Let a device of the host (DHCP, user data) join the network of a bridge."""
        agent = Agent()
        network = {"type": "flat", "physical_network": agent.network(bridge)["name"]}
        if bridge in agent.options.vlans:
            network.update({"type": "vlan", "vlan_id": agent.options.vlans[bridge]})
        body = {"device": veth, "mac": _mac_of(veth), "backend": "dpdkvhostuser", "network": network,
                "trusted": True}
        agent.call("PUT", "service-ports", SERVICE + veth, body)

    def deleteOuterFromBridge(self, bridge, veth):
        Agent().call("DELETE", "service-ports", SERVICE + veth)

    @staticmethod
    def getBondFromFile(name):
        """A bond of dpdk-bond.yaml, or a NIC that DPDK has as a bond of one: kvmagent finds no netdev."""
        bond = original_ctl.getBondFromFile(name)
        if bond is not None or has_netdev(name):
            return bond
        agent = Agent()
        networks = [] if name in agent.options.interfaces else agent.networks("br_" + name)
        devices = taken_by_dpdk(name, agent.options.interfaces, networks)
        if not devices:
            return None
        bond = ovs.Bond()
        bond.name, bond.slaves = name, devices
        return bond

    def dpdkOvsSync(self, bridges):
        """Bring bridges and NICs to what ZStack lists; 0, or an error that names each that failed.

        NICs of ZStack that it does not list are removed if no VM is connected to them. Bridges and
        ports that are not the agent's are never touched.
        """
        agent, failures, networks, listed = Agent(sync=True), [], [], set()

        def attempt(name, function, *arguments):
            try:
                return function(agent, *arguments)
            except PluginError as error:
                failures.append("%s: %s" % (name, error))

        for bridge in bridges:
            network = attempt(bridge.name, self._prepared, bridge.physicalInterface, bridge.name)
            networks += [network] if network else []
            # One by one: a batch with a NIC that is not valid would be refused as a whole.
            for nic in (bridge.ports or ()) if network else ():
                listed.add(nic.nicInternalName)
                attempt(nic.nicInternalName, self._put, network, nic.vmUuid, nic)
        report = agent.call("POST", "reconcile", body={})
        for change in report["changes"]:
            logger.info("sync: %s" % change["detail"])
        failures += [sentence(error) for error in report["errors"]]
        _raise_if(failures + agent.delete_ports(self._stale(agent, networks, listed)), "sync")
        return 0

    def resourceConfigure(self, pages, page_kb, socket_mem):
        """Check that OVS-DPDK has what it needs to work; 0. Hugepages are reserved at boot, not here."""
        Agent().require("dpdkvhostuser")
        return 0

    def smartNicInit(self, nicName, reserve, page, socketMem, vfs):
        """Check that vDPA works and that the NIC has its VFs; [], as kvmagent's own answers."""
        agent = Agent()
        agent.require("vdpa")
        found = sum(vf["pf"] == nicName for vf in agent.call("GET", "vfs"))
        if found < int(float(vfs or 0)):
            text = "%s has %d virtual functions, not %s. Fix: write %s into its sriov_numvfs (docs/nics.md)"
            raise PluginError(text % (nicName, found, vfs, vfs))
        return []

    def smartNicRestore(self, nicName):
        """0: smartNicInit changes nothing that could be restored."""
        return 0

    def configPmdCpuMaskForOvs(self, cpuMask):
        """Set the CPUs of the PMD threads by a mask."""
        Agent().call("PUT", "pmd", body={"cpus": cpus_of(cpuMask)})

    def checkOvsStatusWapper(self):
        """Log whether OVS-DPDK works. The netplugin agent watches it; nothing restarts it here."""
        try:
            Agent().require("dpdkvhostuser")
            logger.info("the netplugin agent answers, and OVS-DPDK works")
        except PluginError as error:
            logger.error(str(error))

    checkBondStatusWapper = checkOvsStatusWapper

    @staticmethod
    def _prepared(agent, interface, bridge):
        for network in agent.networks(bridge):
            if carries(network, interface, agent.options.interfaces):
                return network
            has = ", ".join(uplinks(network)) or "none"
            raise PluginError("bridge %s has the uplink %s, not %s" % (bridge, has, interface))
        devices, mode = devices_of(interface, agent.options.interfaces)
        ovs_part = {"devices": devices, "bond": mode}
        body = {"bridge": bridge, "mtu": agent.options.mtu, "keep": True, "ovs": ovs_part}
        return agent.call("PUT", "physical-networks", bridge, body)

    @staticmethod
    def _put(agent, network, vmUuid, nic):
        spec = port_spec(vmUuid, nic, agent.options, network["name"])
        return agent.call("PUT", "ports", nic.nicInternalName, spec)

    def _stale(self, agent, networks, listed):
        """The NICs that ZStack plugged and does not list, without a VM since they were plugged."""
        stale = []
        for port in agent.call("GET", "ports"):
            name = port["port_id"]
            on = any(_is_ours(port, network) for network in networks)
            if name in listed or not on or not NIC_NAME.match(name):
                continue
            young = name in self.plugged and _now() - self.plugged[name][1] < YOUNG_S
            unused = not young and (port.get("observed") or {}).get("connected") is False
            logger.warn("sync: ZStack does not list %s; it %s" % (name, "is removed" if unused else "stays"))
            stale += [name] if unused else []
        return stale


def _mac_of(device):
    try:
        with open(os.path.join(SYSFS, "class/net", device, "address")) as address:
            return address.read().strip()
    except IOError:
        raise PluginError("%s is no network interface of this host. Fix: create it first" % device)


def _socket_path(port):
    return str((port.get("binding") or {}).get("socket_path") or "")


def _is_ours(port, network=None):
    """Whether a port is of a backend of ZStack's, on this physical network if one is given."""
    spec = port["spec"]
    on = network is None or spec["network"].get("physical_network") == network["name"]
    return on and spec["backend"] in BACKENDS.values()


def _raise_if(failures, of_what):
    if failures:
        raise PluginError("%s: %d failed: %s" % (of_what, len(failures), "; ".join(failures)))


def get_ovs_ctl(with_dpdk=None):
    """In place of `ovs.getOvsCtl`; OVS without DPDK stays with kvmagent."""
    return OvsCtl() if with_dpdk else original_get_ctl(with_dpdk)


get_ovs_ctl.original = original_get_ctl
ovs.OvsDpdkCtl = OvsCtl
ovs.getOvsCtl = get_ovs_ctl
logger.info("OVS-DPDK calls go to the netplugin agent (options: %s)" % CONFIG)
