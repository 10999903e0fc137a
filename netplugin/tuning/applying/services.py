"""Settings of services: irqbalance and tuned, as ``NAME=value`` lines in files under /etc."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable

from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.host.cpus import format_list, to_kernel
from netplugin.tuning.applying.accessor import K, Raw, SettingAccessor, required
from netplugin.tuning.applying.kernel import refusals
from netplugin.tuning.facts import Cpus
from netplugin.tuning.read.cpus import banned_cpus, cpu_list, masked_cpus
from netplugin.tuning.read.kernel import TUNED, variables_path
from netplugin.tuning.steps import BannedCpus, TunedProfile, TunedVariable


def last_line(name: str, text: str | None) -> Raw:
    """The last line that sets ``name``, empty if no line does, None if there is no file."""
    if text is None:
        return None
    found = _lines(name, text)
    return found[-1][0] if found else ""


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


_NAME = "IRQBALANCE_BANNED_CPULIST"
#: First version that reads the list (irqbalance commit 677b686e223c).
_LEAST = (1, 8)
_RESTART_S, _VERSION_S = 60.0, 10.0


class _LineInFile(SettingAccessor[K]):
    """Raw value: the last line that sets the name, empty if none does, None if there is no file."""

    @abstractmethod
    def _where(self, target: K) -> tuple[str, str]:
        """The path of the file and the name."""

    def read(self, target: K) -> Raw:
        return last_line(self._where(target)[1], self._text(target))

    def value(self, target: K, raw: Raw) -> str | None:
        return (raw or "").partition("=")[2].strip() or None

    def write(self, target: K, desired: str | None) -> None:
        self.restore(target, f"{self._where(target)[1]}={desired}")

    def _text(self, target: K) -> str | None:
        """The file's exact text; ``Root.text`` would strip white space."""
        path, _ = self._where(target)
        with refusals(path):
            return self._root.whole(path)


class IrqbalanceFile(_LineInFile[BannedCpus]):
    """irqbalance is restarted if it runs."""

    def _where(self, target: BannedCpus) -> tuple[str, str]:
        return target.path, _NAME

    def value(self, target: BannedCpus, raw: Raw) -> str | None:
        text = super().value(target, raw)
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
        super().write(target, desired)
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


#: Timeout in seconds: tuned-adm returns when the profile is active; some profiles stop services or build
#: an initrd.
_PROFILE_S = 300.0
_AUTO = "auto "


class TunedVariables(_LineInFile[TunedVariable]):
    def _where(self, target: TunedVariable) -> tuple[str, str]:
        return variables_path(target.profile), target.name

    def restore(self, target: TunedVariable, raw: Raw) -> None:
        path, text = variables_path(target.profile), self._text(target)
        changed = with_line(target.name, text or "", raw)
        with refusals(path):
            if raw is None and not changed:
                self._root.remove(path)
            elif changed != text:
                self._root.replace(path, changed)


class TunedProfiles(SettingAccessor[TunedProfile]):
    """Raw value: the profile, prefixed with ``auto`` if tuned chose it; None if no profile is active."""

    def read(self, target: TunedProfile) -> Raw:
        profile = required(self._root.optional(f"{TUNED}/active_profile", str))
        if not profile:
            return None
        by_itself = self._root.text(f"{TUNED}/profile_mode") == "auto"
        return f"{_AUTO}{profile}" if by_itself else profile

    def value(self, target: TunedProfile, raw: Raw) -> str | None:
        return raw.removeprefix(_AUTO) if raw else None

    def restore(self, target: TunedProfile, raw: Raw) -> None:
        if raw is None:
            self._run(["tuned-adm", "off"], _PROFILE_S)
        elif raw.startswith(_AUTO):
            self._run(["tuned-adm", "auto_profile"], _PROFILE_S)
        else:
            self._run(["tuned-adm", "profile", *raw.split()], _PROFILE_S)
