"""The role that each call requires: by route, and by fields of the body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError
from starlette.routing import compile_path

from netplugin.api.batch_models import Retag
from netplugin.api.models import PortSpec


class Role(IntEnum):
    """What a caller may do; each role includes the ones before it."""

    READ = 1
    PLUG = 2
    OPERATE = 3

    @staticmethod
    def of(name: str) -> Role:
        """Raises: ValueError."""
        for role in Role:
            if str(role) == name:
                return role
        raise ValueError(f"{name!r} is no role: read, plug or operate")

    def __str__(self) -> str:
        return self.name.lower()


#: Accessible without a credential, for supervisors; they reveal nothing about ports.
OPEN_PATHS = ("/healthz", "/readyz")

#: Every route; the tests compare the table with the application.
ROUTES: tuple[tuple[str, str, Role], ...] = (
    ("GET", "/v1/ports", Role.READ),
    ("GET", "/v1/ports/{port_id}", Role.READ),
    ("PUT", "/v1/ports/{port_id}", Role.PLUG),
    ("DELETE", "/v1/ports/{port_id}", Role.PLUG),
    ("POST", "/v1/ports/{port_id}:migrate", Role.PLUG),
    ("POST", "/v1/ports:migrate-check", Role.READ),
    ("POST", "/v1/ports:batch", Role.PLUG),
    ("POST", "/v1/ports:retag", Role.PLUG),
    ("GET", "/v1/service-ports", Role.READ),
    ("GET", "/v1/service-ports/{port_id}", Role.READ),
    ("PUT", "/v1/service-ports/{port_id}", Role.PLUG),
    ("DELETE", "/v1/service-ports/{port_id}", Role.PLUG),
    ("POST", "/v1/vms/{vm_id}:render-domain", Role.PLUG),
    ("POST", "/v1/vms/{vm_id}:check-domain", Role.READ),
    ("GET", "/v1/networks", Role.READ),
    ("GET", "/v1/networks/{network_id}", Role.READ),
    ("PUT", "/v1/networks/{network_id}", Role.PLUG),
    ("DELETE", "/v1/networks/{network_id}", Role.PLUG),
    ("GET", "/v1/physical-networks", Role.READ),
    ("GET", "/v1/physical-networks/{name}", Role.READ),
    ("PUT", "/v1/physical-networks/{name}", Role.OPERATE),
    ("DELETE", "/v1/physical-networks/{name}", Role.OPERATE),
    ("GET", "/v1/events", Role.READ),
    ("GET", "/v1/backends", Role.READ),
    ("GET", "/v1/host", Role.READ),
    ("GET", "/v1/host/checks", Role.READ),
    ("GET", "/v1/vfs", Role.READ),
    ("DELETE", "/v1/vfs/{pci_address}/quarantine", Role.OPERATE),
    ("GET", "/v1/pmd", Role.READ),
    ("GET", "/v1/pmd/proposal", Role.READ),
    ("PUT", "/v1/pmd", Role.OPERATE),
    ("POST", "/v1/reconcile", Role.PLUG),
    ("GET", "/v1/tasks/{taskuuid}", Role.READ),
    ("GET", "/metrics", Role.READ),
    ("GET", "/openapi.json", Role.READ),
    # Of ZStack; without [api] zstack they are answered with 404.
    ("POST", "/network/ovsdpdk/createbridge", Role.OPERATE),
    ("POST", "/network/ovsdpdk/checkbridge", Role.READ),
    ("POST", "/network/ovsdpdk/deletebridge", Role.OPERATE),
    ("POST", "/network/ovsdpdk/generatevdpa", Role.PLUG),
    ("POST", "/network/ovsdpdk/deletevdpa", Role.PLUG),
    ("POST", "/network/ovsdpdk/addvhostuserclient", Role.PLUG),
    ("POST", "/network/ovsdpdk/deletevhostuserclient", Role.PLUG),
    ("POST", "/network/ovsdpdk/sync", Role.PLUG),
    ("POST", "/network/ovsdpdk/resource/configure", Role.READ),
    ("POST", "/hostvirtualnetworkinterface/generate", Role.READ),
    ("POST", "/hostvirtualnetworkinterface/ungenerate", Role.READ),
    ("POST", "/host/ovs/cpu-pin/update", Role.OPERATE),
    ("POST", "/network/checkphysicalnetworkinterface", Role.READ),
)


_COMPILED: tuple[tuple[str, re.Pattern[str], Role], ...] = tuple(
    (method, compile_path(path)[0], role) for method, path, role in ROUTES
)


def of_route(method: str, path: str) -> Role:
    """The role of a route. Unknown routes (answered with 404 or 405) require the highest."""
    for known, pattern, role in _COMPILED:
        if known == method and pattern.match(path):
            return role
    return Role.OPERATE


def _no_ports(wanted: Retag) -> Mapping[str, PortSpec]:
    return {}


@dataclass(frozen=True)
class BodyRules:
    """What decides about a role, like the body: ``[agent] service_devices``, the ports of a retag."""

    service_devices: tuple[str, ...] = ()
    moved: Callable[[Retag], Mapping[str, PortSpec]] = _no_ports

    def are_services(self, device: str) -> bool:
        """Whether devices of this name are there to be service ports."""
        return any(fnmatchcase(device, pattern) for pattern in self.service_devices)


NO_DEVICES = BodyRules()


def of_body(path: str, body: bytes, rules: BodyRules = NO_DEVICES) -> tuple[Role, str] | None:
    """The role that a body requires beyond that of its route, and the field; None if there is none.

    Only values that the models accept count; the application refuses everything else.
    """
    try:
        whole = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None
    for field in _of_operators(path, whole, rules):
        return Role.OPERATE, field
    return None


def _of_operators(path: str, body: Any, rules: BodyRules) -> Iterator[str]:
    if path == "/v1/reconcile":
        if _is(body, "remove_orphans", True):
            yield "remove_orphans=true"
    elif path == "/v1/ports:batch":
        entries = body.get("put") if isinstance(body, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                yield from _of_spec(entry.get("spec"))
    elif path.startswith("/v1/ports/") and path.endswith(":migrate"):
        yield from _of_spec(body.get("port") if isinstance(body, dict) else None)
    elif path.startswith("/v1/ports/"):
        yield from _of_spec(body)
    elif path.startswith("/v1/service-ports/"):
        if _is(body, "trusted", True):
            yield "trusted=true"
        yield from _of_spec(body)
        yield from _of_device(body, rules)
    elif path == "/v1/ports:retag":
        yield from _of_retag(body, rules)


def _of_retag(body: Any, rules: BodyRules) -> Iterator[str]:
    """A port that takes the role to be put on a VLAN takes it to be put on another."""
    try:
        wanted = Retag.model_validate(body)
    except ValidationError:
        return
    for port_id, spec in sorted(rules.moved(wanted).items()):
        stored = spec.model_dump(mode="json")
        for field in (*_of_spec(stored), *_of_device(stored, rules)):
            yield f"port {port_id} with {field}"


def _of_spec(spec: Any) -> Iterator[str]:
    if not isinstance(spec, dict):
        return
    vf, security = spec.get("vf"), spec.get("port_security")
    if _is(vf, "trusted", True):
        yield "vf.trusted=true"
    if _is(vf, "spoofchk", False):
        yield "vf.spoofchk=false"
    if _is(vf, "trunk", True):
        yield "vf.trunk=true"
    if _is(security, "enabled", False):
        yield "port_security.enabled=false"
    if isinstance(security, dict) and security.get("roles"):
        yield "port_security.roles"


def _of_device(spec: Any, rules: BodyRules) -> Iterator[str]:
    """Any virtual device of the host may be another VM's, unless an operator says what its name means.

    An internal port of OVS is made for its service.
    """
    device = spec.get("device") if isinstance(spec, dict) and not _is(spec, "internal", True) else None
    if isinstance(device, str) and not rules.are_services(device):
        yield f"device={device[:15]}, which is not in [agent] service_devices,"


def _is(value: Any, name: str, wanted: bool) -> bool:
    return isinstance(value, dict) and value.get(name) is wanted
