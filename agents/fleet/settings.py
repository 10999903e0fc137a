"""The options of the group ``[fleet]``, read without anything that only a fleet needs."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from agents.api.roles import Role
from netplugin.api.errors import InvalidRequest
from netplugin.fleet.names import Credentials, checked_endpoint, checked_name


@dataclass(frozen=True)
class FleetSettings:
    endpoints: tuple[str, ...]
    host: str
    credentials: Credentials
    #: What the fleet's values may ask for on this host.
    role: Role

    @staticmethod
    def read(conf: Any) -> FleetSettings | None:
        """None: this host has no fleet. Raises: ValueError."""
        group = conf.fleet
        if not group.endpoints:
            return None
        if find_spec("grpc") is None or find_spec("google.protobuf") is None:
            raise ValueError("[fleet] endpoints takes grpcio and protobuf: pip install 'netplugin[fleet]'")
        try:
            endpoints = tuple(map(checked_endpoint, group.endpoints))
            host = checked_name("host", group.host or socket.gethostname())
            credentials = Credentials.of(group)
        except InvalidRequest as wrong:
            raise ValueError(f"[fleet] {wrong.detail}") from None
        return FleetSettings(endpoints, host, credentials, Role.of(group.role))
