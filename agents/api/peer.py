"""Identifies the peer of a connection from the kernel and TLS, never from request headers."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

#: Key of the peer in the ``state`` of an ASGI scope (see ``agents.api.server``).
STATE = "netplugin.peer"
# unix(7): struct ucred of SO_PEERCRED is pid, uid, gid.
_UCRED = struct.Struct("3i")
# Supplementary groups (include/uapi/asm-generic/socket.h); Python does not define it.
_SO_PEERGROUPS = 59
_MOST_GROUPS = 256  # the buffer limit of Python's getsockopt


@dataclass(frozen=True)
class Peer:
    """The peer of a connection.

    ``uid``, ``pid`` and ``gids`` are those of the process when it connected to the UNIX socket;
    over TCP ``uid`` is None. ``names`` are the names of a verified client certificate: the common
    name first, then the alternative names.
    """

    address: str
    uid: int | None = None
    gids: frozenset[int] = frozenset()
    pid: int | None = None
    names: tuple[str, ...] = ()

    @property
    def is_local_socket(self) -> bool:
        return self.uid is not None


#: A peer without information: not local, no certificate.
UNKNOWN = Peer("unknown")


def peer_of(transport: Any) -> Peer:
    """The peer of an asyncio transport, as of the time it connected."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, gid = _UCRED.unpack(credentials)
        return Peer(f"unix pid {pid}", uid, frozenset({gid, *_groups(connection)}), pid)
    name = transport.get_extra_info("peername")
    if not name:  # it has already disconnected
        return UNKNOWN
    host, port = name[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Peer(address, names=_names(transport.get_extra_info("peercert") or {}))


def _groups(connection: Any) -> tuple[int, ...]:
    """The supplementary groups; none if there are too many to read, so only the primary group counts."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _names(certificate: Any) -> tuple[str, ...]:
    """Common and alternative names of a certificate in the format of ``ssl.getpeercert``."""
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    others = [
        value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "email")
    ]
    return tuple(dict.fromkeys([*common, *others]))
