"""The bodies of the calls of a live migration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from netplugin.api.domain_models import RenderRequest
from netplugin.api.fields import Flag, Name, PortId, Value
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


class MigrateCheck(Value):
    """A port that is to come here: its spec here, and as it is on the source.

    ``source_facts`` are the ``facts`` of its backend there (``GET /v1/backends``); what is not in them
    is not compared. ``postcopy``: whether the VM's memory is to follow after the VM. ``domain``: the
    VM's domain on the source, and the policy by which it is rendered here: whether it can be placed.
    """

    port_id: PortId
    port: PortSpec
    source: PortSpec
    source_facts: Annotated[dict[Name, str | int | bool], Field(max_length=64)] = Field(default={})
    postcopy: Flag = False
    domain: RenderRequest | None = None
