"""The one directory that a machine is read and written under."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from netplugin.tuning.root import Root, sync_folder


class WritableRoot(Root):
    """Beside what is read: files of the kernel are written in place, others replaced as a whole.

    All of these raise OSError.
    """

    def whole(self, path: str) -> str | None:
        """The file's text with the white space around it; None if there is none."""
        try:
            return self._bytes(path).decode(errors="surrogateescape")
        except FileNotFoundError:
            return None

    def write(self, path: str, text: str) -> None:
        """One write of the text as a line, to a file that is there: so the kernel's files want it."""
        self._write(path, f"{text}\n".encode())

    def replace(self, path: str, text: str) -> None:
        """The whole file, or the old one: never a part of it. Mode and owner stay."""
        self._replace(path, text.encode(errors="surrogateescape"))

    def remove(self, path: str) -> None:
        """A file that is gone already is no error."""
        self._at(path).unlink(missing_ok=True)

    def _write(self, path: str, data: bytes) -> None:
        # Neither made nor cut short: the kernel's files know neither, and nothing else is written so.
        descriptor = os.open(self._at(path), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def _replace(self, path: str, data: bytes) -> None:
        file = self._at(path).resolve()
        old = file.stat() if file.exists() else None
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        draft = Path(name)
        try:
            with open(descriptor, "wb") as opened:
                opened.write(data)
                os.fchmod(descriptor, old.st_mode & 0o7777 if old else 0o644)
                if old:
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                opened.flush()
                os.fsync(descriptor)
            draft.replace(file)
            sync_folder(file.parent)
        finally:
            draft.unlink(missing_ok=True)
