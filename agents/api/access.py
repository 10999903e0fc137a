"""Who calls, by the kernel, TLS or a bearer token and never by another header; and with which role."""

from __future__ import annotations

import grp
import hashlib
import hmac
import os
import pwd
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.api.roles import Role
from netplugin.api.errors import Forbidden, Unauthorized
from netplugin.host.safe_files import PRIVATE, UnsafeFile, read_own

_CALLER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")
_NAMED = re.compile(r"([a-z]+):(\S*)\s+(\S+)\Z")
ANY = "*"
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


@dataclass(frozen=True)
class Token:
    """A bearer token with its role and its name in the audit log."""

    secret: bytes
    name: str
    role: Role = Role.OPERATE


@dataclass(frozen=True)
class Caller:
    """An authenticated caller."""

    name: str
    role: Role


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read bearer tokens from a private file, one per line.

    A line is ``<token>`` or ``<role>:<name> <token>``.

    Raises: ValueError.
    """
    try:
        text = read_own(path, deny=PRIVATE).decode()
    except UnsafeFile as wrong:
        raise ValueError(f"[api] token_file {wrong}") from None
    except OSError as wrong:
        raise ValueError(f"[api] token_file {path} cannot be read: {wrong.strerror}") from None
    lines = enumerate((line.strip() for line in text.splitlines()), start=1)
    tokens = tuple(_token(path, n, line) for n, line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError(f"{path} has no token in it")
    return tokens


def _token(path: Path, number: int, line: str) -> Token:
    """Parse one line. The errors do not contain the line, because it is a secret."""
    if not re.search(r"\s", line):
        # A name that distinguishes tokens in the audit log without revealing them.
        return Token(line.encode(), f"token-{hashlib.sha256(line.encode()).hexdigest()[:8]}")
    found = _NAMED.match(line)
    if not found or not _CALLER_NAME.match(found[2]):
        raise ValueError(f"{path} line {number} is neither a token nor <role>:<name> <token>")
    try:
        return Token(found[3].encode(), found[2], Role.of(found[1]))
    except ValueError as wrong:
        raise ValueError(f"{path} line {number}: {wrong}") from None


@dataclass(frozen=True)
class Rules:
    """Roles by certificate name and by local user, from ``[api] cert_roles`` and ``socket_roles``."""

    certificates: tuple[tuple[Role, str], ...] = ((Role.OPERATE, ANY),)
    users: tuple[tuple[Role, int | None], ...] = ()
    groups: tuple[tuple[Role, int], ...] = ()

    @staticmethod
    def read(api: Any) -> Rules:
        """Raises: ValueError naming the option."""
        users: list[tuple[Role, int | None]] = []
        groups: list[tuple[Role, int]] = []
        for role, name in _entries("socket_roles", api.socket_roles):
            try:
                if name == ANY:
                    users.append((role, None))
                elif name.startswith("@"):
                    groups.append((role, _id(name[1:], lambda n: grp.getgrnam(n).gr_gid)))
                else:
                    users.append((role, _id(name, lambda n: pwd.getpwnam(n).pw_uid)))
            except KeyError:
                raise ValueError(f"[api] socket_roles: there is no {name!r} here") from None
        certificates = tuple(_entries("cert_roles", api.cert_roles))
        return Rules(certificates, tuple(users), tuple(groups))

    def of_certificate(self, names: Sequence[str]) -> Role | None:
        return max((role for role, name in self.certificates if name in (ANY, *names)), default=None)

    def of_user(self, peer: Peer) -> Role | None:
        """The role of a local user.

        Root and the agent's own user have all rights, because they could change the agent anyway.
        """
        if peer.uid in (0, os.geteuid()):
            return Role.OPERATE
        found = [role for role, uid in self.users if uid in (None, peer.uid)]
        found += [role for role, gid in self.groups if gid in peer.gids]
        return max(found, default=None)


def _entries(option: str, entries: Sequence[str]) -> list[tuple[Role, str]]:
    found = []
    for entry in entries:
        role, colon, name = str(entry).partition(":")
        if not (colon and name):
            raise ValueError(f"[api] {option}: {entry!r} is not <role>:<name>")
        try:
            found.append((Role.of(role), name))
        except ValueError as wrong:
            raise ValueError(f"[api] {option}: {wrong}") from None
    return found


def _id(name: str, look_up: Any) -> int:
    # isdigit() alone accepts digits that int() does not, such as a superscript two.
    return int(name) if name.isascii() and name.isdigit() else int(look_up(name))


@dataclass(frozen=True)
class Access:
    """The configured credentials. Without tokens and client certificates, TCP callers are not checked."""

    tokens: tuple[Token, ...] = ()
    mutual_tls: bool = False
    rules: Rules = Rules()

    @property
    def has_credential(self) -> bool:
        return bool(self.tokens) or self.mutual_tls

    def identify(self, peer: Peer, authorization: bytes) -> Caller:
        """Authenticate a call. Raises: Unauthorized; Forbidden for a known caller without a role."""
        if peer.is_local_socket:
            return _with_role(f"uid-{peer.uid}", self.rules.of_user(peer), "socket_roles")
        callers = []
        if self.mutual_tls:
            # TLS has verified the certificate; connections without one were rejected.
            name = peer.names[0] if peer.names else "certificate-without-name"
            callers.append(_with_role(name, self.rules.of_certificate(peer.names), "cert_roles"))
        if self.tokens:
            callers.append(self._with_token(authorization))
        if not callers:
            return Caller("anonymous", Role.OPERATE)
        # If both are required, the lower role applies.
        return Caller(callers[-1].name, min(caller.role for caller in callers))

    def _with_token(self, authorization: bytes) -> Caller:
        scheme, _, sent = authorization.partition(b" ")
        # Compare with all tokens, each in constant time, so that the duration reveals nothing.
        matches = [t for t in self.tokens if hmac.compare_digest(sent.strip(), t.secret)]
        if scheme.lower() != b"bearer" or not matches:
            raise Unauthorized(
                "a bearer token is needed and this call has none that is known",
                step="authenticate",
                fix="send the header Authorization: Bearer <a token of [api] token_file>",
            )
        return Caller(matches[0].name, matches[0].role)


def require(caller: Caller, needed: Role, what: str) -> None:
    """Raises: Forbidden naming the role that ``what`` requires."""
    if caller.role < needed:
        raise Forbidden(
            f"{what} needs the role {needed}; {caller.name} has {caller.role}",
            step="authorize",
            fix=f"call with a credential of the role {needed}",
        )


def _with_role(name: str, role: Role | None, option: str) -> Caller:
    if role is None:
        raise Forbidden(f"{name} has no role", step="authorize", fix=f"give it one in [api] {option}")
    return Caller(name, role)
