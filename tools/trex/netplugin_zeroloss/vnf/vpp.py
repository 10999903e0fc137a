"""The VNF ``vpp``: routes all frames of a port to a static neighbour behind its partner port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from netplugin.host import cpus
from netplugin.programs.program import ProgramError
from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.machines import LocalMachine
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    ProgramVnf,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
    VppDescription,
)
from netplugin_zeroloss.vnf.dpdk import check_cores, devices_of
from netplugin_zeroloss.vnf.guest import check_nics
from netplugin_zeroloss.vnf.vpp_api import Api, VppPlace

# -- API messages that configure VPP to route between pairs of ports. -----------------------------


#: Interface addresses (RFC 5737). Each port has a /30: VPP the first host, the far end the second.
_ADDRESSES = IPv4Address("192.0.2.0")
_ADMIN_UP = 1  # IF_STATUS_API_FLAG_ADMIN_UP in vnet/interface_types.api
_STATIC = 1  # IP_API_NEIGHBOR_FLAG_STATIC in vnet/ip-neighbor/ip_neighbor.api
_LABELS = 16  # of fib_path in vnet/fib/fib_types.api


def routing(ports: Sequence[VnfPort], interfaces: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages with their fields (pure); ``interfaces``: VPP's interface index per port.

    Each port has its own table with one route to the far end of its partner. The addresses of the test
    frames need not be known, and no ARP is needed.
    """
    for number, (index, port) in enumerate(zip(interfaces, ports, strict=True)):
        here = {"sw_if_index": index}
        yield "ip_table_add_del", {"is_add": True, "table": {"table_id": number + 1, "name": f"port{number}"}}
        yield "sw_interface_set_table", here | {"vrf_id": number + 1}
        yield "sw_interface_set_mtu", here | {"mtu": [port.mtu, 0, 0, 0]}
        yield "sw_interface_set_flags", here | {"flags": _ADMIN_UP}
        prefix = f"{_ADDRESSES + 4 * number + 1}/30"
        yield "sw_interface_add_del_address", here | {"is_add": True, "prefix": prefix}
        neighbour = {"flags": _STATIC, "mac_address": port.peer_mac, "ip_address": _far(number)}
        yield "ip_neighbor_add_del", {"is_add": True, "neighbor": here | neighbour}
    for number in range(len(ports)):
        partner = number ^ 1
        path = {"sw_if_index": interfaces[partner], "weight": 1, "nh": {"address": {"ip4": _far(partner)}}}
        path["label_stack"] = [{}] * _LABELS  # a fixed-length array, even if empty
        route = {"table_id": number + 1, "prefix": "0.0.0.0/0", "n_paths": 1, "paths": [path]}
        yield "ip_route_add_del", {"is_add": True, "route": route}


def _far(number: int) -> str:
    return str(_ADDRESSES + 4 * number + 2)


# -- The VNF ``vpp``: routes all frames of a port to a static neighbour behind its partner port. --


_API = "api.sock"
_LAST_LINES = 12
_LINK_UP = 2  # IF_STATUS_API_FLAG_LINK_UP in vnet/interface_types.api
#: Where the threads run, and which one polls which queue.
_READ_BACK = ("show threads", "show interface rx-placement")
#: Plug-ins that drive ports.
_PLUGINS = {Attachment.VFIO: "dpdk", Attachment.VHOST_BACKEND: "vhost", Attachment.NETDEV: "af_packet"}


class Vpp(ProgramVnf):
    """VPP on this machine or in a VM, with the routes of ``routing``."""

    name = "vpp"

    def __init__(
        self,
        description: VppDescription,
        ports: tuple[VnfPort, ...],
        cores: VnfCores,
        connect: Callable[[Path], Api] = Api,
    ) -> None:
        """Raises: VnfError for ports that VPP does not support on that machine."""
        check_nics(self.name, description, ports)
        for port in () if description.nics else ports:
            if port.attachment not in _PLUGINS:
                why = "it is the switch's side of vhost-user, as OVS is, and takes no tap or vDPA device"
                fix = "Put it into a VM (machine: ssh), or use testpmd"
                raise VnfError(f"vpp cannot take {port.device} on this machine: {why} of a port. {fix}")
        if description.nics:
            pairs = zip(ports, description.nics, strict=True)
            ports = tuple(replace(port, attachment=Attachment.VFIO, device=nic) for port, nic in pairs)
        super().__init__(ports, cores)
        self._description, self._connect = description, connect
        self._queues = description.rx_queues or max(port.queues for port in ports)
        self._api: Api | None = None
        self._interfaces: list[int] = []

    def start(self) -> VnfInfo:
        try:
            return self._start()
        except ProgramError as error:
            raise VnfError(f"{error}{self._log()}") from error

    def _start(self) -> VnfInfo:
        deadline = time.monotonic() + self._description.start_s
        if isinstance(self._description.machine, LocalMachine):
            check_cores(self._cores)
            devices_of(self._ports)
        machine = self._on(self._description.machine, deadline)
        conf = startup_conf(machine.directory, self._description, self._ports, self._cores, self._queues)
        path, socket = f"{machine.directory}/startup.conf", f"{machine.directory}/{_API}"
        machine.write(path, conf)
        program = self._run(machine, [self._description.binary, "-c", path])
        program.wait_for(lambda: machine.has("-S", socket), deadline, "its API is there")
        self._api = api = self._connect(machine.socket(socket, deadline))
        self._parts.callback(api.close)
        version = str(api.call("show_version").version)
        self._interfaces = [self._interface(number) for number in range(len(self._ports))]
        for message, fields in routing(self._ports, self._interfaces):
            api.call(message, **fields)
        self._wait_for_links(deadline)
        self._check_queues()
        read_back = {command: self._printed(command) for command in _READ_BACK}
        queues = (self._queues,) * len(self._ports)
        return VnfInfo(self.name, version, queues, {"startup.conf": conf, **read_back})

    def check(self) -> None:
        super().check()
        self._check_queues()

    @property
    def place(self) -> DropCounters:
        return VppPlace(self._printed, self._interfaces)

    def _interface(self, number: int) -> int:
        """Return VPP's interface index: creates the interface, or finds it by its name in startup.conf."""
        port, api = self._ports[number], self._asked
        if port.attachment is Attachment.VHOST_BACKEND:
            fields = {"is_server": True, "sock_filename": port.device}
            fields |= {"use_custom_mac": True, "mac_address": port.mac}
            return int(api.call("create_vhost_user_if_v2", **fields).sw_if_index)
        if port.attachment is Attachment.NETDEV:
            fields = {"mode": 1, "host_if_name": port.device, "use_random_hw_addr": False}
            fields |= {"hw_addr": port.mac, "num_rx_queues": self._queues, "num_tx_queues": 1}
            return int(api.call("af_packet_create_v3", **fields).sw_if_index)
        name = INTERFACE.format(number=number)
        for details in api.dump("sw_interface_dump"):
            if details.interface_name == name:
                index = int(details.sw_if_index)
                api.call("sw_interface_set_mac_address", sw_if_index=index, mac_address=port.mac)
                return index
        raise VnfError(
            f"vpp has no interface for {port.device}: is it bound to vfio-pci or uio_pci_generic there?"
        )

    def _links(self) -> Sequence[bool]:
        found = {each.sw_if_index: int(each.flags) for each in self._asked.dump("sw_interface_dump")}
        return [bool(found.get(index, 0) & _LINK_UP) for index in self._interfaces]

    def _check_queues(self) -> None:
        """Raises: VnfError if a port has other receive queues than asked: VPP silently uses one then."""
        for port, index in zip(self._ports, self._interfaces, strict=True):
            placed = self._asked.dump("sw_interface_rx_placement_dump", sw_if_index=index)
            queues = len({int(each.queue_id) for each in placed if each.sw_if_index == index})
            if queues != self._queues:
                raise VnfError(
                    f"vpp polls {queues} receive queues of {port.device}, not the {self._queues} that were"
                    f" asked: give the VM's NIC as many, or ask for rx_queues: {queues}"
                )

    def _printed(self, command: str) -> str:
        return str(self._asked.call("cli_inband", cmd=command).reply)

    @property
    def _asked(self) -> Api:
        if self._api is None:
            raise VnfError("vpp has not been started")
        return self._api

    def _log(self) -> str:
        """Return the end of the log of a running VPP, or of what one that has ended wrote."""
        text, machine = "", self._machine
        with suppress(ProgramError):
            text = machine.run(["cat", f"{machine.directory}/vpp.log"]) if machine else ""
        with suppress(ProgramError):
            text = self._printed("show log")
        return "".join(f"\n  {line}" for line in text.splitlines()[-_LAST_LINES:])


# -- VPP's startup.conf from CPUs, NICs and queues (FD.io's startup.conf reference). ---------------


#: Interface name of a DPDK port.
INTERFACE = "port{number}"
#: Buffers in addition to those in rings: in the graph, and in per-worker caches.
_SPARE_BUFFERS = 16384


def startup_conf(
    directory: str, description: VppDescription, ports: Sequence[VnfPort], cores: VnfCores, queues: int
) -> str:
    """Return the file (pure). ``directory`` contains the sockets and is VPP's runtime-dir.

    The order of sections has no meaning for VPP.
    """
    nics = [port.device for port in ports if port.attachment is Attachment.VFIO]
    plugins = sorted({_PLUGINS[port.attachment] for port in ports})
    ring, mtu = max(port.ring for port in ports), max(port.mtu for port in ports)
    buffers = 2 * max(2, len(nics)) * queues * ring + _SPARE_BUFFERS
    pages, sleep, path = description.hugepages, description.poll_sleep_us, description.plugin_path
    rings = f"num-rx-queues {queues} num-tx-queues {queues} num-rx-desc {ring} num-tx-desc {ring}"
    # One buffer per frame is faster; jumbo frames need several.
    one_buffer = ["no-multi-seg", "no-tx-checksum-offload"] if mtu <= 1500 else []
    sections: dict[str, list[str | None]] = {
        "unix": [
            "nodaemon",
            f"runtime-dir {directory}",
            f"cli-listen {directory}/cli.sock",
            f"log {directory}/vpp.log",
            None if sleep is None else f"poll-sleep-usec {sleep}",
        ],
        "socksvr": [f"socket-name {directory}/{_API}"],
        "cpu": [
            None if cores.main is None else f"main-core {cores.main}",
            f"corelist-workers {cpus.format_list(cores.workers)}" if cores.workers else None,
        ],
        "buffers": [f"buffers-per-numa {buffers}", None if pages else "page-size default"],
        "plugins": [
            f"path {path}" if path else None,
            "plugin default { disable }",
            *(f"plugin {name}_plugin.so {{ enable }}" for name in plugins),
        ],
        # By default 9000: DPDK then refuses a NIC that tells the MTU of its network.
        "ethernet": [f"default-mtu {mtu}"],
    }
    if nics:
        sections["dpdk"] = [
            *one_buffer,
            # With the default of 10 s, frames missed by the NIC would be counted in a later trial.
            "stats-poll-interval 0.1",
            None if pages else "no-hugetlb",
            # Workers poll, and uio_pci_generic has no interrupt per queue: the port would stay down.
            f"dev default {{ {rings} no-rx-interrupts }}",
            *(f"dev {nic} {{ name {INTERFACE.format(number=n)} }}" for n, nic in enumerate(nics)),
        ]
    made = ((name, [f"  {line}\n" for line in lines if line]) for name, lines in sections.items())
    return "".join(f"{name} {{\n{''.join(lines)}}}\n" for name, lines in made if lines)
