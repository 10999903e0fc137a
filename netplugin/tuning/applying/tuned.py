"""tuned: variables of its profiles, one line each in a file, and the active profile."""

from __future__ import annotations

from netplugin.errors import HostError
from netplugin.tuning.applying.config_lines import last_line, value_of, with_line
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.applying.programs import Run
from netplugin.tuning.applying.refusals import refusals
from netplugin.tuning.applying.writable import WritableRoot
from netplugin.tuning.read.kernel import TUNED, variables_path
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import TunedProfile, TunedVariable

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

    def write(self, target: TunedVariable, wanted: str | None) -> None:
        self.restore(target, f"{target.name}={wanted}")

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

    def write(self, target: TunedProfile, wanted: str | None) -> None:
        self.restore(target, wanted)

    def restore(self, target: TunedProfile, raw: Raw) -> None:
        if raw is None:
            self._run(["tuned-adm", "off"], _PROFILE_S)
        elif raw.startswith(_AUTO):
            self._run(["tuned-adm", "auto_profile"], _PROFILE_S)
        else:
            self._run(["tuned-adm", "profile", *raw.split()], _PROFILE_S)
