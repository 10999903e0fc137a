"""The names of a fleet's objects, members and files, for those who need nothing else of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from netplugin.api.errors import InvalidRequest
from netplugin.api.fields import NAME_PATTERN, PATTERN_WORDS

#: Where files and the user are named.
FILES = "[fleet] ca, cert and so on of a host; --ca, --cert or NETPLUGIN_FLEET_CA and so on of a command"


class Kind(StrEnum):
    """What the fleet has on a host."""

    PHYSICAL_NETWORK = "physical-network"
    NETWORK = "network"
    PORT = "port"
    SERVICE_PORT = "service-port"


#: The kinds of which a VM or a service has a NIC.
PORTS = (Kind.PORT, Kind.SERVICE_PORT)


@dataclass(frozen=True, order=True, slots=True)
class Ref:
    """One object of a host."""

    kind: Kind
    id: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.id}"

    @staticmethod
    def of(path: str) -> Ref:
        """From the end of a key. Raises: InvalidRequest."""
        kind, _, id = path.partition("/")
        if kind not in {*Kind}:
            raise InvalidRequest.of_field("key", f"{kind[:80]!r} is no kind of object")
        return Ref(Kind(kind), checked_name("key", id))


@dataclass(frozen=True)
class Credentials:
    """The file with etcd's CA, and what the user has: a certificate with its key, a password, or both."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None

    @staticmethod
    def of(given: Mapping[str, Any]) -> Credentials:
        """From options of these names. Raises: InvalidRequest that names the first that is missing."""
        password, certificate = ("user", "password_file"), ("cert", "key")
        chosen = [pair for pair in (password, certificate) if any(given[name] for name in pair)]
        for name in ("ca", *chain(*(chosen or [certificate]))):
            if not given[name]:
                what = "is required: etcd is used with TLS, and a certificate or a password"
                raise InvalidRequest.of_field(name, what, fix=f"set {FILES}")
        files = {name: Path(given[name]) for name in ("ca", *certificate, "password_file") if given[name]}
        return Credentials(user=given["user"] or "", **files)


def checked_name(field: str, name: str) -> str:
    """The name of a host or the id of an object. Raises: InvalidRequest."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InvalidRequest.of_field(field, f"{PATTERN_WORDS[NAME_PATTERN]}; it is {name[:80]!r}")
    return name


def checked_endpoint(endpoint: str) -> str:
    """``host:port`` of a member, from that or from ``https://host:port``. Raises: InvalidRequest."""
    address = endpoint.strip().removeprefix("https://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise InvalidRequest.of_field("endpoints", f"{endpoint} is not host:port of a member that speaks TLS")
    return address
