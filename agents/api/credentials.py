"""The current tokens and certificates, reloaded when their files change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import replace
from pathlib import Path

from agents.api.access import Access
from agents.api.listen import Listen

LOG = logging.getLogger(__name__)
# Inode, size and times of a file; None if it cannot be read.
_Stamp = tuple[int, int, int, int] | None


class Credentials:
    """The credentials in use.

    If new files are invalid, the old credentials stay in use; the log and ``stale`` (a metric)
    report it.
    """

    def __init__(self, listen: Listen) -> None:
        """Raises: ValueError, OSError."""
        self._listen = listen
        self._stamps = self._look()
        self.access: Access = listen.access
        self.tls: ssl.SSLContext | None = listen.tls_context()
        self.stale = False

    def refresh(self, *, always: bool = False) -> None:
        """Reload the files if they changed, or ``always``. This blocks on disk access."""
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
