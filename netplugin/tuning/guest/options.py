"""Options of a guest plan that the domain does not contain."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from netplugin.tuning.intent import PAGE_1G, PAGE_2M

STEP: Final = "guest-plan"
VFIO: Final = "vfio-pci"
UIO: Final = "uio_pci_generic"
#: Page sizes in the notation of the kernel command line.
PAGE_NAMES: Final = {PAGE_2M: "2M", PAGE_1G: "1G"}

_Mac = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$"),
    AfterValidator(str.lower),
]


def _page_size(kb: int) -> int:
    if kb not in PAGE_NAMES:
        raise ValueError(f"pages have {' or '.join(map(str, PAGE_NAMES))} KB")
    return kb


class GuestOptions(BaseModel):
    """Options of a guest plan; each field is a command line option."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    housekeeping: Annotated[int, Field(ge=1, le=4096)] = Field(
        1,
        description="vCPUs for everything else, the lowest; made whole cores where the guest has siblings",
    )
    hugepage_mb: Annotated[int, Field(ge=0, le=1 << 26)] | None = Field(
        None, description="memory in hugepages, MB; not given: half of the guest's"
    )
    hugepage_kb: Annotated[int, AfterValidator(_page_size)] | None = Field(
        None, description="2048 or 1048576; not given: 1 GB where the host backs the VM with such"
    )
    dpdk: tuple[_Mac, ...] | None = Field(
        None,
        description="MAC of a NIC that a DPDK program is to have; not given: those on vhost-user",
    )
    no_dpdk: bool = Field(False, description="no NIC is for DPDK: all stay with the kernel")
    driver: Literal["vfio-pci", "uio_pci_generic"] = Field(
        "vfio-pci", description="vfio-pci or uio_pci_generic: what NICs for DPDK are bound to"
    )
    mtu: Annotated[int, Field(ge=68, le=65535)] | None = Field(
        None,
        description="MTU of the NICs that stay with the kernel, bytes, where the domain has none",
    )
    realtime: bool | None = Field(
        None, description="latency counts more than throughput; not given: as the domain has it"
    )
