"""VPP's command line in place of its binary API, for machines that exchange no byte streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from netplugin_zeroloss.vnf.contract import VnfError

_LINK_UP = 2  # IF_STATUS_API_FLAG_LINK_UP in vnet/interface_types.api
#: ``show interface`` and ``show hardware-interfaces brief``: name, index, state of the interface or link.
_INTERFACE = re.compile(r"^(\S+)\s+(\d{1,20})\s+(up|down)\b", re.MULTILINE)
_PLACED = re.compile(r"^\s+(\S+) queue (\d{1,20}) \(", re.MULTILINE)
_VERSION = re.compile(r"^vpp v?(\S+)")


class Cli:
    """Runs ``vppctl`` for each message that VNF ``vpp`` sends; fields are those of VPP's ``.api`` files."""

    def __init__(self, run: Callable[[Sequence[str]], str], vppctl: str, socket: str) -> None:
        """``run`` runs a command on VPP's machine and returns its output."""
        self._run = run
        self._command = (vppctl, "-s", socket)

    def call(self, message: str, **fields: Any) -> Any:
        """Run the command of a message. Raises: VnfError if VPP rejects it: it then prints why."""
        if message == "show_version":
            printed = self._ask("show version")
            found = _VERSION.match(printed)
            return SimpleNamespace(version=found[1] if found else printed.strip())
        if message == "cli_inband":
            return SimpleNamespace(reply=self._ask(str(fields["cmd"])))
        command = command_of(message, fields, {index: name for name, index in self._indices().items()})
        if printed := self._ask(command).strip():
            raise VnfError(f"VPP refuses `{command}`: {printed}")
        return SimpleNamespace(retval=0)

    def dump(self, message: str, **fields: Any) -> list[Any]:
        """Return the details that the VNF asks for. Raises: VnfError."""
        indices = self._indices()
        if message == "sw_interface_dump":
            links = {name: state for name, _, state in _INTERFACE.findall(self._hardware())}
            return [
                SimpleNamespace(
                    interface_name=name, sw_if_index=index, flags=_LINK_UP * (links.get(name) == "up")
                )
                for name, index in indices.items()
            ]
        assert message == "sw_interface_rx_placement_dump", message
        placed = _PLACED.findall(self._ask("show interface rx-placement"))
        return [
            SimpleNamespace(sw_if_index=indices[name], queue_id=int(queue))
            for name, queue in placed
            if indices.get(name) == fields["sw_if_index"]
        ]

    def close(self) -> None:
        """Do nothing: each command has a connection of its own."""

    def _ask(self, command: str) -> str:
        return self._run([*self._command, *command.split()])

    def _indices(self) -> dict[str, int]:
        return {name: int(index) for name, index, _ in _INTERFACE.findall(self._ask("show interface"))}

    def _hardware(self) -> str:
        return self._ask("show hardware-interfaces brief")


def command_of(message: str, fields: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """Return the command that does what a message does (pure). ``names``: interfaces by index."""
    name = names.get(fields.get("sw_if_index", -1), "")
    match message:
        case "ip_table_add_del":
            return f"ip table add {fields['table']['table_id']}"
        case "sw_interface_set_table":
            return f"set interface ip table {name} {fields['vrf_id']}"
        case "sw_interface_set_mtu":
            return f"set interface mtu packet {fields['mtu'][0]} {name}"
        case "sw_interface_set_mac_address":
            return f"set interface mac address {name} {fields['mac_address']}"
        case "sw_interface_set_flags":
            return f"set interface state {name} {'up' if fields['flags'] else 'down'}"
        case "sw_interface_add_del_address":
            return f"set interface ip address {name} {fields['prefix']}"
        case "ip_neighbor_add_del":
            neighbour = fields["neighbor"]
            via = names[neighbour["sw_if_index"]]
            return f"set ip neighbor {via} {neighbour['ip_address']} {neighbour['mac_address']} static"
        case "ip_route_add_del":
            route = fields["route"]
            (path,) = route["paths"]
            via = f"{path['nh']['address']['ip4']} {names[path['sw_if_index']]}"
            return f"ip route add {route['prefix']} table {route['table_id']} via {via}"
    raise VnfError(f"VPP's command line has nothing for {message}")
