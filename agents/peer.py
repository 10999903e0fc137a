"""Who is at the other end of a connection, as the kernel and TLS say; no header is believed."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

#: Key of the peer in the ``state`` of an ASGI scope (see ``agents.server``).
STATE = "netplugin.peer"
# unix(7): struct ucred of SO_PEERCRED is pid, uid, gid.
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """``uid``, ``gid`` and ``pid`` are of the process that connected to the UNIX socket; over TCP
    they are None, and ``address`` is an IP address and a port."""

    address: str
    uid: int | None = None
    gid: int | None = None
    pid: int | None = None

    @property
    def is_local_socket(self) -> bool:
        return self.uid is not None


#: Of a connection about which nothing is known: not local, no certificate.
UNKNOWN = Peer("unknown")


def peer_of(transport: Any) -> Peer:
    """The peer of an asyncio transport, as it was when it connected."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, gid = _UCRED.unpack(credentials)
        return Peer("unix", uid, gid, pid)
    name = transport.get_extra_info("peername")
    if not name:  # it has gone already
        return UNKNOWN
    host, port = name[:2]
    return Peer(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
