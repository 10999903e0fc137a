"""The desired state that an intent describes, as values for ``plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from drivers.linuxbridge.changes import Tap
from drivers.linuxbridge.segments import Segment
from netplugin.backend import Intent, Overlay
from netplugin.models import PortSpec


@dataclass(frozen=True)
class Wanted:
    tap: Tap
    spec: PortSpec
    segment: Segment
    overlay: Overlay | None

    @classmethod
    def of(cls, intent: Intent) -> Self:
        assert intent.spec is not None
        tap = Tap.of(intent.port_id, intent.spec, intent.stamp)
        return cls(tap, intent.spec, Segment.of(intent.spec.network), intent.overlay)
