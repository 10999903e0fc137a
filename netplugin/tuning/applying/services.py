"""Settings of services: irqbalance and tuned, as ``NAME=value`` lines in files under /etc."""

from __future__ import annotations

import re
from collections.abc import Callable

from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.host.cpus import format_list, to_kernel
from netplugin.tuning.applying.accessor import Raw, Run, WritableRoot
from netplugin.tuning.applying.kernel import refusals
from netplugin.tuning.facts import Cpus
from netplugin.tuning.read.cpus import banned_cpus, cpu_list, masked_cpus
from netplugin.tuning.read.kernel import TUNED, variables_path
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import BannedCpus, TunedProfile, TunedVariable

# -- Find, replace and remove a ``NAME=value`` line in the text of a file under /etc (pure). ------


def last_line(name: str, text: str | None) -> Raw:
    """The last line that sets ``name``, empty if no line does, None if there is no file."""
    if text is None:
        return None
    found = _lines(name, text)
    return found[-1][0] if found else ""


def value_of(raw: Raw) -> str | None:
    return (raw or "").partition("=")[2].strip() or None


def with_line(name: str, text: str, line: Raw) -> str:
    """Return the text with ``line`` in place of the last such line, or appended; an empty line removes it."""
    found = _lines(name, text)
    begin, end = found[-1].span() if found else (len(text), len(text))
    if line and found:
        return text[:begin] + line + text[end:]
    if line:
        return f"{text}{line}\n" if not text or text.endswith("\n") else f"{text}\n{line}"
    if not found:
        return text
    # A line appended to a file without a final newline was written with the newline before it.
    return text[:begin] + text[end + 1 :] if end < len(text) else text[: max(0, begin - 1)]


def _lines(name: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"^{re.escape(name)}[ \t]*=.*$", text, re.MULTILINE))


# -- CPUs banned from irqbalance: a line in its environment file; irqbalance is restarted if it runs.


_NAME = "IRQBALANCE_BANNED_CPULIST"
#: First version that reads the list (irqbalance commit 677b686e223c).
_LEAST = (1, 8)
_RESTART_S, _VERSION_S = 60.0, 10.0


class IrqbalanceFile:
    """Raw value: the last line that sets the list, empty if none does, None if there is no file."""

    def __init__(self, root: WritableRoot, run: Run) -> None:
        self._root, self._run = root, run

    def read(self, target: BannedCpus) -> Raw:
        return last_line(_NAME, self._text(target))

    def value(self, target: BannedCpus, raw: Raw) -> str | None:
        text = value_of(raw)
        try:
            return text and format_list(banned_cpus(f"{_NAME}={text}") or ())
        except ValueError:
            return text

    def write(self, target: BannedCpus, desired: str | None) -> None:
        """Set the list. Raises: HostError if irqbalance is too old for it or the older variable, a mask,
        overrides it. A mask of the same CPUs is accepted: every version reads it."""
        version = self._version()
        if version and version < _LEAST and self._in_words(target, masked_cpus) != desired:
            mask = f"IRQBALANCE_BANNED_CPUS={to_kernel(cpu_list(desired or ''))}"
            raise HostError(
                f"irqbalance {'.'.join(map(str, version))} does not know {_NAME}, which is of 1.8",
                step="apply",
                fix=f"install a newer one, or set {mask} in {target.path}; once the kernel has "
                "isolated them, it leaves them alone by itself",
            )
        self.restore(target, f"{_NAME}={desired}")
        if self._in_words(target, banned_cpus) != desired:
            raise HostError(
                f"{target.path} has IRQBALANCE_BANNED_CPUS, which goes before {_NAME}",
                step="read-back",
                fix="remove it: irqbalance has replaced it by the list; or, where a tuned "
                "before 2.24 wrote it, let that write these CPUs: tuned-adm profile",
            )

    def restore(self, target: BannedCpus, raw: Raw) -> None:
        text = self._text(target)
        changed = with_line(_NAME, text or "", raw)
        if changed == text or (text is None and not changed):
            return
        with refusals(target.path):
            self._root.replace(target.path, changed)
        # irqbalance reads the file only at start; try-restart does not start it if it is stopped.
        self._run(["systemctl", "try-restart", "irqbalance.service"], _RESTART_S)

    def _version(self) -> tuple[int, ...] | None:
        """The installed version, or None without irqbalance, when nothing reads the file."""
        try:
            words = self._run(["irqbalance", "--version"], _VERSION_S)
        except BackendUnavailable:
            return None
        except HostError as ended:  # up to 1.9, exit status 1 after printing the version
            words = ended.detail
        found = re.search(r"version (\d+)\.(\d+)", words)
        return tuple(map(int, found.groups())) if found else None

    def _in_words(self, target: BannedCpus, read: Callable[[str], Cpus | None]) -> str | None:
        """The CPUs that the file bans as a CPU list, parsed with ``read``; None if invalid or absent."""
        try:
            found = read(self._text(target) or "")
        except ValueError:
            return None
        return None if found is None else format_list(found)

    def _text(self, target: BannedCpus) -> str | None:
        with refusals(target.path):
            return self._root.whole(target.path)


# -- tuned: variables of its profiles, one line each in a file, and the active profile. -----------


#: Timeout in seconds: tuned-adm returns when the profile is active; some profiles stop services or build
#: an initrd.
_PROFILE_S = 300.0
_AUTO = "auto "


class TunedVariables:
    """Raw value: the last line that sets the variable, empty if none does, None if there is no file."""

    def __init__(self, root: WritableRoot) -> None:
        self._root = root

    def read(self, target: TunedVariable) -> Raw:
        return last_line(target.name, self._text(target))

    def value(self, target: TunedVariable, raw: Raw) -> str | None:
        return value_of(raw)

    def write(self, target: TunedVariable, desired: str | None) -> None:
        self.restore(target, f"{target.name}={desired}")

    def restore(self, target: TunedVariable, raw: Raw) -> None:
        path, text = variables_path(target.profile), self._text(target)
        changed = with_line(target.name, text or "", raw)
        with refusals(path):
            if raw is None and not changed:
                self._root.remove(path)
            elif changed != text:
                self._root.replace(path, changed)

    def _text(self, target: TunedVariable) -> str | None:
        """The file's exact text; ``Root.text`` would strip white space."""
        path = variables_path(target.profile)
        with refusals(path):
            return self._root.whole(path)


class TunedProfiles:
    """Raw value: the profile, prefixed with ``auto`` if tuned chose it; None if no profile is active."""

    def __init__(self, root: WritableRoot, run: Run) -> None:
        self._root, self._run = root, run

    def read(self, target: TunedProfile) -> Raw:
        profile = self._root.text(f"{TUNED}/active_profile")
        if isinstance(profile, Unknown) and not profile.missing:
            raise HostError(f"{profile.path}: {profile.reason}", step="read")
        if isinstance(profile, Unknown) or not profile:
            return None
        by_itself = self._root.text(f"{TUNED}/profile_mode") == "auto"
        return f"{_AUTO}{profile}" if by_itself else profile

    def value(self, target: TunedProfile, raw: Raw) -> str | None:
        return raw.removeprefix(_AUTO) if raw else None

    def write(self, target: TunedProfile, desired: str | None) -> None:
        self.restore(target, desired)

    def restore(self, target: TunedProfile, raw: Raw) -> None:
        if raw is None:
            self._run(["tuned-adm", "off"], _PROFILE_S)
        elif raw.startswith(_AUTO):
            self._run(["tuned-adm", "auto_profile"], _PROFILE_S)
        else:
            self._run(["tuned-adm", "profile", *raw.split()], _PROFILE_S)
