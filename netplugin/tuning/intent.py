"""The purpose of a host, for a plan: cores, memory and links; and its group ``[host]`` of options."""

from __future__ import annotations

from typing import Annotated, Any, Final

from oslo_config import cfg
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from netplugin.api.fields import worded
from netplugin.programs.bounded import first_mistake

_Count = Annotated[int, Field(ge=0, le=4096)]
_Some = Annotated[int, Field(ge=1, le=4096)]
_Mb = Annotated[int, Field(ge=0, le=1 << 26)]
#: MTU in bytes, within the limits of OVS and the kernel.
_Mtus = Annotated[tuple[Annotated[int, Field(ge=68, le=9702)], ...], Field(min_length=1)]
#: A NIC, by PCI address or interface name, and its number of VFs.
_VFS = worded(r"^[^\s=]{1,64}=[0-9]{1,5}$", "must be a NIC and its number of VFs, such as eth1=8")
_Vfs = Annotated[str, StringConstraints(pattern=_VFS)]

PAGE_2M: Final = 2048
PAGE_1G: Final = 1048576


class HostIntent(BaseModel):
    """Input of a plan. Cores are physical cores with all their SMT siblings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pmd_cores: _Count = Field(
        description="whole cores for PMD threads on the nodes of the NICs; 0 for a host without OVS-DPDK"
    )
    vm_pmd_cores: _Count = Field(
        1,
        description="whole cores for PMD threads on each other node with VM cores, to poll the "
        "vhost-user ports of its VMs; 0 if VMs there have none",
    )
    vm_cores: _Count | None = Field(None, description="whole cores for VMs; not given: all remaining cores")
    emulator_cores: _Count = Field(
        1,
        description="whole cores for QEMU's own threads on each node with VM cores; 0: they run "
        "on housekeeping cores",
    )
    housekeeping_cores: _Some = Field(1, description="whole cores on each node for everything else")
    idle_siblings: bool = Field(
        False,
        description="run one PMD thread or vCPU per core and leave its sibling idle: less "
        "throughput, steadier latency",
    )
    nics: tuple[str, ...] = Field(
        (),
        description="PCI addresses or interface names of the NICs that OVS uses; not given: "
        "those bound to DPDK drivers, or else the fastest",
    )
    vfs: tuple[_Vfs, ...] = Field(
        (),
        description="number of VFs of each NIC, like 0000:3b:00.0=8 or ens1f0=8; NICs that "
        "are not named keep their VFs",
    )
    links: _Count = Field(1, description="number of links that carry traffic")
    link_gbps: Annotated[float, Field(gt=0, le=800)] = Field(10, description="speed of one link, Gbit/s")
    mtus: _Mtus = Field((1500,), description="all MTUs in use, bytes")
    queues: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="receive queues per port")
    vm_memory_mb: _Mb = Field(0, description="memory of all VMs together, MB")
    vm_size_mb: _Mb = Field(
        0,
        description="memory of one VM, MB, of the largest if they differ: each node gets "
        "memory for whole VMs; 0: memory is divided by VM cores",
    )
    vm_ports: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None,
        description="vhost-user ports of all VMs, which matter if OVS has per-port-memory; "
        "not given: the present number, and at least one for each VM core",
    )
    hugepage_kb: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="hugepage size, KB: 2048 or 1048576, on ARM one that the kernel "
        "supports; not given: the largest up to 1 GB of which each node has room for 16",
    )
    realtime: bool = Field(False, description="prefer low latency to throughput and power saving")


GROUP = "host"

_LIBVIRT_URI = cfg.StrOpt(
    "libvirt_uri",
    default="qemu:///system",
    help="The libvirt of this host, queried for versions and for the CPU pinning of running domains.",
)


def _option(name: str, field: FieldInfo) -> Any:
    """The option for a field of ``HostIntent``, which validates it and names the field."""
    words = f"{str(field.description)[:1].upper()}{str(field.description)[1:]}."
    default = None if field.is_required() else field.default
    if isinstance(default, tuple):
        return cfg.ListOpt(name, default=[str(each) for each in default], help=words)
    of_float = cfg.FloatOpt if field.annotation is float else cfg.IntOpt
    return (cfg.BoolOpt if isinstance(default, bool) else of_float)(name, default=default, help=words)


OPTIONS = [_LIBVIRT_URI, *(_option(name, field) for name, field in HostIntent.model_fields.items())]


def given(conf: Any) -> dict[str, Any]:
    """Intent fields set in ``[host]``; the caller may override them."""
    values = {name: getattr(conf[GROUP], name) for name in HostIntent.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def intent_of(conf: Any) -> HostIntent | None:
    """The intent of ``[host]``, or None if ``pmd_cores`` is not set. Raises: ValueError naming the option."""
    values = given(conf)
    if "pmd_cores" not in values:
        return None
    try:
        return HostIntent.model_validate(values)
    except ValidationError as wrong:
        field, _, mistake = first_mistake(wrong).partition(": ")
        raise ValueError(f"[{GROUP}] {field.partition('.')[0]}: {mistake}") from None  # the option of an item
