"""Whether a part of the host can be used, with the reason and the fix; and why a reconcile is due."""

from __future__ import annotations

from dataclasses import dataclass

from netplugin.api.errors import BackendUnavailable, NetpluginError


@dataclass(frozen=True)
class Usability:
    """Whether a backend can be used on this host now and, if not, the reason and the fix."""

    usable: bool
    reason: str | None = None
    fix: str | None = None
    step: str = "probe"

    @staticmethod
    def without(missing: NetpluginError) -> Usability:
        """Unusable, with the reason and the fix of an error."""
        return Usability(False, missing.detail, missing.fix, missing.step)

    def problem(self) -> BackendUnavailable | None:
        """The error for an unusable backend; None if it is usable."""
        if self.usable:
            return None
        return BackendUnavailable(str(self.reason), step=self.step, fix=self.fix)

    def require(self) -> None:
        """Raises: BackendUnavailable if the backend is unusable."""
        if problem := self.problem():
            raise problem


@dataclass(frozen=True)
class Wake:
    """A backend's request to reconcile these ports, or (``ports`` None) all of its ports."""

    reason: str
    ports: frozenset[str] | None = None
