"""The bodies of the calls of a live migration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from netplugin.api.fields import Value
from netplugin.api.migration import Activation
from netplugin.api.models import PortSpec

#: What a caller asks of a port.
MigrationStep = Literal["prepare", "activate", "commit", "abort", "leave"]


class MigrateRequest(Value):
    """One step of a migration.

    ``port`` is the spec on the destination, for ``prepare`` alone. ``activation``, for ``prepare`` and
    ``leave``: with ``auto`` the port is opened and closed as its guest runs and stops here.
    """

    phase: MigrationStep
    port: PortSpec | None = None
    activation: Activation | None = None

    @model_validator(mode="after")
    def _fits_phase(self) -> Self:
        if (self.port is None) == (self.phase == "prepare"):
            raise ValueError("port is required for prepare, and for no other phase")
        if self.activation is not None and self.phase not in ("prepare", "leave"):
            raise ValueError("activation belongs to prepare and leave")
        return self
