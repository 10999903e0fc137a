"""Options of a guest plan that the domain does not contain."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from netplugin.tuning.intent import PAGE_1G, PAGE_2M

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
        description="number of vCPUs for everything but DPDK, the lowest; rounded up to whole "
        "cores if the guest has SMT siblings",
    )
    hugepage_mb: Annotated[int, Field(ge=0, le=1 << 26)] | None = Field(
        None, description="memory in hugepages, MB; not given: half of the guest's memory"
    )
    hugepage_kb: Annotated[int, AfterValidator(_page_size)] | None = Field(
        None,
        description="hugepage size, KB: 2048 or 1048576; not given: 1 GB if the host backs "
        "the VM with 1 GB pages",
    )
    dpdk: tuple[_Mac, ...] | None = Field(
        None,
        description="MAC address of a NIC for a DPDK program; not given: the vhost-user NICs",
    )
    no_dpdk: bool = Field(False, description="leave all NICs to the kernel")
    driver: Literal["vfio-pci", "uio_pci_generic"] = Field(
        "vfio-pci", description="driver for the DPDK NICs: vfio-pci or uio_pci_generic"
    )
    mtu: Annotated[int, Field(ge=68, le=65535)] | None = Field(
        None,
        description="MTU of the NICs that stay with the kernel, bytes, if the domain sets none",
    )
    realtime: bool | None = Field(
        None, description="prefer low latency to throughput; not given: as the domain is configured"
    )
