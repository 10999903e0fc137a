"""The role that each call requires: what its endpoint declares, and what fields of its body add."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

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
        if name not in map(str, Role):
            raise ValueError(f"{name!r} is no role: read, plug or operate")
        return Role[name.upper()]

    def __str__(self) -> str:
        return self.name.lower()


# -- What a body requires beyond its route. ------------------------------------------------------


@dataclass(frozen=True)
class BodyRules:
    """What decides about a role, like the body: ``[agent] service_devices``, the ports of a retag."""

    service_devices: tuple[str, ...]
    moved: Callable[[Retag], Mapping[str, PortSpec]]

    def are_services(self, device: str) -> bool:
        """Whether devices of this name are there to be service ports."""
        return any(fnmatchcase(device, pattern) for pattern in self.service_devices)


#: From the JSON of a body: its fields that only ``operate`` may send. Values that the models refuse do not
#: count, because the application refuses them too.
OfBody = Callable[[Any, BodyRules], Iterator[str]]


def of_reconcile(body: Any, rules: BodyRules) -> Iterator[str]:
    if _is(body, "remove_orphans", True):
        yield "remove_orphans=true"


def of_port(spec: Any, rules: BodyRules) -> Iterator[str]:
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


def of_batch(body: Any, rules: BodyRules) -> Iterator[str]:
    entries = body.get("put") if isinstance(body, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            yield from of_port(entry.get("spec"), rules)


def of_migration(body: Any, rules: BodyRules) -> Iterator[str]:
    yield from of_port(body.get("port") if isinstance(body, dict) else None, rules)


def of_service_port(body: Any, rules: BodyRules) -> Iterator[str]:
    if _is(body, "trusted", True):
        yield "trusted=true"
    yield from of_port(body, rules)
    yield from _of_device(body, rules)


def of_retag(body: Any, rules: BodyRules) -> Iterator[str]:
    """A port that takes the role to be put on a VLAN takes it to be put on another."""
    try:
        retag = Retag.model_validate(body)
    except ValidationError:
        return
    for port_id, spec in sorted(rules.moved(retag).items()):
        stored = spec.model_dump(mode="json")
        for field in (*of_port(stored, rules), *_of_device(stored, rules)):
            yield f"port {port_id} with {field}"


def _of_device(spec: Any, rules: BodyRules) -> Iterator[str]:
    """Any virtual device of the host may be another VM's, unless an operator says what its name means.

    An internal port of OVS is made for its service.
    """
    device = spec.get("device") if isinstance(spec, dict) and not _is(spec, "internal", True) else None
    if isinstance(device, str) and not rules.are_services(device):
        yield f"device={device[:15]}, which is not in [agent] service_devices,"


def _is(value: Any, name: str, expected: bool) -> bool:
    return isinstance(value, dict) and value.get(name) is expected


# -- The right that an endpoint declares, and that of the route which the router takes. -----------

_DECLARED = "__netplugin_right__"
# A path as the API has it: names and words, no empty segment, no ``.`` or ``..``.
_PATH = re.compile(r"(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9._:-]+)+\Z")
E = TypeVar("E", bound=Callable[..., Any])


@dataclass(frozen=True)
class Right:
    """What a call requires. ``role``: None for everybody, without a credential."""

    role: Role | None
    of_body: OfBody | None = None

    def more(self, body: bytes, rules: BodyRules) -> str | None:
        """The first field of a body that only ``operate`` may send; None if there is none."""
        if self.of_body is None:
            return None
        try:
            whole = json.loads(body) if body else None
        except (ValueError, RecursionError):
            return None
        return next(self.of_body(whole, rules), None)


def needs(role: Role | None, of_body: OfBody | None = None) -> Callable[[E], E]:
    """Declare the role that an endpoint requires, and the fields of its body that require more."""

    def declare(endpoint: E) -> E:
        setattr(endpoint, _DECLARED, Right(role, of_body))
        return endpoint

    return declare


#: For supervisors; what such an endpoint answers reveals nothing about ports.
open_to_all = needs(None)


def right_of(endpoint: Any) -> Right:
    """Raises: TypeError for an endpoint without a right."""
    found = getattr(endpoint, _DECLARED, None)
    if not isinstance(found, Right):
        raise TypeError(f"{endpoint!r} says with neither needs() nor open_to_all who may call it")
    return found


def of_call(routes: Sequence[BaseRoute], scope: Scope) -> Right | None:
    """The right of the route that the router takes; None if the path is not in normal form.

    Any other spelling of a path is refused, so that nothing depends on who decodes it: a name has only
    characters that nobody encodes, apart from the ``:`` of PCI addresses. Without a route (404 or 405) the
    call requires the highest role.
    """
    path = scope["path"]
    raw = scope.get("raw_path", path.encode(errors="replace")).decode("latin-1")
    if not _PATH.match(path):
        return None
    route = _taken(routes, scope)
    if raw != path:
        if re.sub("%3a", ":", raw, flags=re.I) != path or _taken(routes, {**scope, "path": raw}) is not route:
            return None
    return Right(Role.OPERATE) if route is None else right_of(getattr(route, "endpoint", None))


def _taken(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    return next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
