"""The keys of a fleet in etcd and their values: what writers, agents and operators share.

A value has the very JSON of a PUT as its ``spec``, and a generation, which grows with each change of its key.
"""

from __future__ import annotations

from typing import Annotated, Generic, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from netplugin.api.conditions import digest
from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import invalid
from netplugin.api.fields import Flag, Value
from netplugin.api.models import NetworkSpec, PortSpec
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.api.problem import Problem
from netplugin.api.service_models import ServicePortSpec
from netplugin.fleet.names import Kind, Ref

Spec: TypeAlias = PortSpec | ServicePortSpec | NetworkSpec | PhysicalNetworkSpec
S = TypeVar("S", PortSpec, ServicePortSpec, NetworkSpec, PhysicalNetworkSpec)
M = TypeVar("M", bound=BaseModel)
#: A revision or a generation: etcd has 64 bits, of which the first is a sign.
Number = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Positive = Annotated[int, Field(ge=1, lt=1 << 63, strict=True)]
_ROOT = "/netplugin/v1"
# The largest spec that the models accept, a network with its peers, is a third of it.
_LARGEST = 256 << 10


class Desired(Value, Generic[S]):
    """What a host is to have: an object with this spec, or (``deleted``) none any more.

    ``drained``: the removal is part of a drain of the whole host, which no brake stops.
    """

    generation: Positive
    spec: S | None = None
    deleted: Flag = False
    drained: Flag = False

    @model_validator(mode="after")
    def _either(self) -> Self:
        if self.deleted == (self.spec is not None):
            raise ValueError("give a spec, or deleted: true")
        if self.drained and not self.deleted:
            raise ValueError("drained is for a value with deleted: true")
        return self

    @property
    def digest(self) -> str:
        return digest_of(self.spec)


AnyDesired: TypeAlias = (
    Desired[PortSpec] | Desired[ServicePortSpec] | Desired[NetworkSpec] | Desired[PhysicalNetworkSpec]
)
_DESIRED: dict[Kind, type[AnyDesired]] = {
    Kind.PHYSICAL_NETWORK: Desired[PhysicalNetworkSpec],
    Kind.NETWORK: Desired[NetworkSpec],
    Kind.PORT: Desired[PortSpec],
    Kind.SERVICE_PORT: Desired[ServicePortSpec],
}


class Acceptance(Value):
    """An operator's word that the etcd of ``cluster`` counts as it was at ``revision``.

    ``replaces``: the cluster that the hosts knew before, which after most restores is the same. ``number``
    is above that of every acceptance before, so that one which a backup brings back has no effect.
    """

    number: Positive
    cluster: str
    replaces: str
    revision: Number


class _Written(BaseModel):
    """What an agent writes: a reader of an older version ignores fields that it does not know."""

    model_config = ConfigDict(frozen=True)


class Alive(_Written):
    """The agent that has a host name now, by the identity of its store, and which of its copies it is."""

    identity: str
    instance: str = ""
    version: str


class Summary(_Written):
    """What became of a host's objects up to ``revision``. ``digest``: of their generations.

    ``highest`` is the highest revision of ``cluster`` that the host has seen, ``accepted`` the number of the
    last acceptance. ``refused``: why nothing that was read is carried out.
    """

    identity: str
    version: str
    cluster: str
    highest: Number
    accepted: Number
    revision: Number
    digest: str
    counts: dict[str, int]
    refused: Problem | None = None


class Fault(_Written):
    """Why an object is not as desired: failed, degraded, waiting, unlisted or overridden."""

    state: str
    generation: Number = 0
    error: Problem | None = None


def digest_of(spec: Spec | None) -> str:
    """Empty for none. A newer version, whose models have more fields with defaults, computes the same."""
    return "" if spec is None else digest(spec.model_dump_json(exclude_defaults=True))


def root(part: str = "") -> str:
    """The prefix of all keys, or of those of all hosts in one part: desired, reported, alive, accepted."""
    return f"{_ROOT}/{part}/" if part else f"{_ROOT}/"


def desired_prefix(host: str) -> str:
    return f"{_ROOT}/desired/{host}/"


def desired_key(host: str, ref: Ref) -> str:
    return f"{desired_prefix(host)}{ref}"


def reported_prefix(host: str) -> str:
    return f"{_ROOT}/reported/{host}/"


def summary_key(host: str) -> str:
    return f"{reported_prefix(host)}summary"


def alive_key(host: str) -> str:
    return f"{_ROOT}/alive/{host}"


def roll_key(ref: Ref) -> str:
    """How far a change of this object has come, on all hosts."""
    return f"{_ROOT}/roll/{ref}"


def acceptance_keys(host: str) -> tuple[str, str]:
    """That of all hosts, and that of this one."""
    return f"{_ROOT}/accepted", f"{_ROOT}/accepted/{host}"


def parsed(ref: Ref, value: bytes) -> AnyDesired:
    """Raises: InvalidRequest."""
    return valid_value(_DESIRED[ref.kind], value)


def valid_value(model: type[M], value: bytes) -> M:
    """Raises: InvalidRequest."""
    if len(value) > _LARGEST:
        raise InvalidRequest.of_field("value", f"has {len(value)} bytes, of at most {_LARGEST}")
    try:
        return model.model_validate_json(value)
    except ValidationError as wrong:
        raise invalid(wrong.errors(include_url=False, include_input=False)) from None
    except (ValueError, RecursionError) as wrong:
        raise InvalidRequest.of_field("value", f"cannot be read: {wrong}") from None


def cluster_name(cluster_id: int) -> str:
    """A cluster's id as ``etcdctl member list`` prints it: JSON has no whole numbers of 64 bits."""
    return f"{cluster_id:x}"
