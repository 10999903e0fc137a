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
# include/uapi/asm-generic/socket.h: the supplementary groups; Python has no name for it.
_SO_PEERGROUPS = 59
_MOST_GROUPS = 256  # what Python's getsockopt has room for


@dataclass(frozen=True)
class Peer:
    """``uid``, ``pid`` and ``gids`` are of the process that connected to the UNIX socket, as it was
    then; over TCP ``uid`` is None. ``names`` are those of a verified client certificate: its common
    name first, then the alternative names."""

    address: str
    uid: int | None = None
    gids: frozenset[int] = frozenset()
    pid: int | None = None
    names: tuple[str, ...] = ()

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
        return Peer(f"unix pid {pid}", uid, frozenset({gid, *_groups(connection)}), pid)
    name = transport.get_extra_info("peername")
    if not name:  # it has gone already
        return UNKNOWN
    host, port = name[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Peer(address, names=_names(transport.get_extra_info("peercert") or {}))


def _groups(connection: Any) -> tuple[int, ...]:
    """None of a process that is in more than we can read: it has the rights of its first one."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _names(certificate: Any) -> tuple[str, ...]:
    """Common names and alternative names, of a certificate in the form of ``ssl.getpeercert``."""
    common = [
        value
        for part in certificate.get("subject", ())
        for key, value in part
        if key == "commonName"
    ]
    others = [value for kind, value in certificate.get("subjectAltName", ())
              if kind in ("DNS", "URI", "email")]  # fmt: skip
    return tuple(dict.fromkeys([*common, *others]))
