"""The sockets that the agent listens on, and their credentials: TCP needs one, and TLS outside loopback."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.api.access import Access, Rules, Token, read_tokens
from netplugin.host.safe_files import OF_GROUP, UnsafeFile, opened, own_directory, path_of_own
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
_BACKLOG = 2048
# Seconds between looks at the files of credentials.
_LOOK_EVERY_S = 5.0
# unix(7): sun_path has 108 bytes, including the terminating zero.
_LONGEST_PATH = 107
# Inode, size and times of a file; None if it cannot be read.
_Stamp = tuple[int, int, int, int] | None


@dataclass(frozen=True)
class LocalSocket:
    """The UNIX socket for local callers: the permissions of its file decide who can connect."""

    path: Path
    #: None: only the agent's own user can connect.
    gid: int | None

    @staticmethod
    def read(api: Any) -> LocalSocket | None:
        """Raises: ValueError."""
        if not api.socket:
            return None
        path = Path(api.socket)
        if not path.is_absolute() or len(os.fsencode(path)) > _LONGEST_PATH:
            raise ValueError(f"[api] socket {path} must be an absolute path of {_LONGEST_PATH} bytes at most")
        try:
            gid = grp.getgrnam(api.socket_group).gr_gid if api.socket_group else None
        except KeyError:
            raise ValueError(f"[api] socket_group {api.socket_group}: there is no such group") from None
        return LocalSocket(path, gid)

    def bind(self) -> socket.socket:
        """Bind and listen, replacing the socket of a dead agent.

        The directory is created if missing, and only root or our own user may replace what is in it: callers
        send their requests to whoever listens there.

        Raises: OSError, also if the path is not a socket of ours or another process listens on it.
        """
        try:
            own_directory(self.path.parent, 0o755)
        except UnsafeFile as wrong:
            raise OSError(f"[api] socket {self.path}: {wrong}") from None
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Serialize two agents that start at once: the second one finds the socket of the first.
            fcntl.flock(directory, fcntl.LOCK_EX)
            self._remove_stale()
            # Linux creates the file with the mode of the socket's inode: it is never open to
            # others.
            os.fchmod(made.fileno(), 0o600)
            made.bind(str(self.path))
            if self.gid is not None:
                with opened(os.open(self.path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory)) as file:
                    os.chown(f"/proc/self/fd/{file}", -1, self.gid)
                    os.chmod(f"/proc/self/fd/{file}", 0o660)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
        finally:
            os.close(directory)
        return made

    def remove(self, *, with_directory: bool) -> None:
        """Remove the socket; ``with_directory``: also its directory, if nothing else is in it."""
        self.path.unlink(missing_ok=True)
        if with_directory:
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()

    def _remove_stale(self) -> None:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise OSError(f"[api] socket {self.path} is there and is no socket. Fix: move it away")
        if found.st_uid not in (0, os.geteuid()):
            owner = f"belongs to user {found.st_uid}, and not to root or the user that runs this"
            raise OSError(f"[api] socket {self.path} {owner}. Fix: look who listens there, and remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
            except BlockingIOError:  # full backlog: the other process is alive
                pass
        raise OSError(f"[api] socket {self.path}: another process listens on it")


@dataclass(frozen=True)
class Listen:
    """The ``[api]`` options, checked to be safe."""

    socket: LocalSocket | None
    #: None: no TCP.
    host: str | None
    port: int
    #: The credentials at start.
    access: Access
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None

    @staticmethod
    def read(conf: Any) -> Listen:
        """Raises: ValueError naming what is missing; OSError for a file that cannot be read."""
        api = conf.api
        listen = Listen(
            socket=LocalSocket.read(api),
            host=str(api.bind_host) if api.bind_host else None,
            port=api.bind_port,
            access=Access(
                tokens=read_tokens(Path(api.token_file)) if api.token_file else (),
                mutual_tls=bool(api.client_ca),
                rules=Rules.read(api),
            ),
            token_file=api.token_file,
            tls_cert=api.tls_cert,
            tls_key=api.tls_key,
            client_ca=api.client_ca,
        )
        tls = listen.tls_cert and listen.tls_key
        if bool(listen.tls_cert) != bool(listen.tls_key):
            raise ValueError("[api] tls_cert and tls_key go together")
        if listen.client_ca and not tls:
            raise ValueError("[api] client_ca needs tls_cert and tls_key")
        if listen.socket is None and listen.host is None:
            raise ValueError("[api] has neither a socket nor a bind_host: nobody could call")
        if listen.host is None:
            return listen
        if not listen.is_loopback():
            _require(listen, bool(tls), "is not a loopback address and needs tls_cert and tls_key")
            _require(
                listen,
                listen.access.has_credential,
                "is not a loopback address and needs a credential: client_ca (mutual TLS) or token_file",
            )
        _require(
            listen,
            listen.access.has_credential or api.insecure_loopback,
            "needs a credential, as any user of this host could call: client_ca, token_file, or for "
            "a lab insecure_loopback; local callers can use [api] socket instead",
        )
        return listen

    def tokens(self) -> tuple[Token, ...]:
        """Read the tokens from the file. Raises: ValueError."""
        return read_tokens(Path(self.token_file)) if self.token_file else ()

    def files(self) -> tuple[Path, ...]:
        """The files that contain credentials."""
        named = (self.token_file, self.tls_cert, self.tls_key, self.client_ca)
        return tuple(Path(name) for name in named if name)

    def tls_context(self) -> ssl.SSLContext | None:
        """Load the TLS context; None without TLS.

        Raises: ValueError naming the option of an unusable file.
        """
        if not (self.tls_cert and self.tls_key):
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            with path_of_own(self.tls_cert) as cert, path_of_own(self.tls_key, deny=OF_GROUP) as key:
                # An empty password prevents a prompt on the terminal.
                context.load_cert_chain(cert, key, password="")
        except OSError as wrong:  # includes errors of OpenSSL
            raise ValueError(
                f"[api] tls_cert and tls_key ({self.tls_cert}, {self.tls_key}) cannot be used: {wrong}"
            ) from None
        if self.client_ca:
            try:
                with path_of_own(self.client_ca) as authority:
                    context.load_verify_locations(authority)
            except OSError as wrong:
                raise ValueError(f"[api] client_ca {self.client_ca} cannot be used: {wrong}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def is_loopback(self) -> bool:
        """Whether ``host`` is a loopback address.

        ``localhost`` is not one, because its address depends on the resolver.
        """
        try:
            return self.host is not None and ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Credentials:
    """The current tokens and certificates, reloaded when their files change.

    If new files are invalid, the old credentials stay in use; the log and ``stale`` (a metric)
    report it.
    """

    def __init__(self, listen: Listen) -> None:
        """Raises: ValueError, OSError."""
        self._listen = listen
        self._reading = threading.Lock()
        self._stamps = self._look()
        self.access: Access = listen.access
        self.tls: ssl.SSLContext | None = listen.tls_context()
        self.stale = False

    async def keep(self, supervisor: Supervisor) -> None:
        """Reload the files when they change, until cancelled."""
        await supervisor.every("credentials", _LOOK_EVERY_S, lambda: asyncio.to_thread(self.refresh))

    def refresh(self, *, always: bool = False) -> None:
        """Reload the files if they changed, or ``always``. Any thread may call it; it waits for the disk."""
        with self._reading:
            stamps = self._look()
            if stamps == self._stamps and not always:
                return
            self._stamps = stamps  # taken before reading: a change meanwhile is detected next time
            try:
                access = replace(self._listen.access, tokens=self._listen.tokens())
                tls = self._listen.tls_context()
            except (ValueError, OSError) as wrong:
                self.stale = True
                LOG.error("new tokens or certificates are not used, the old ones are: %s", wrong)
                return
            self.access, self.tls, self.stale = access, tls, False
        LOG.info("tokens and certificates were read again")

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._listen.files())


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    # The change time also detects a corrected mode.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _require(listen: Listen, met: bool, what: str) -> None:
    if not met:
        raise ValueError(f"[api] bind_host {listen.host} {what}")
