"""The data models of calls about a libvirt domain: what to complete, what to check, and the answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from netplugin.api.fields import Flag, Value


class DomainPolicy(Value):
    """The placement of a domain.

    ``pin``: each vCPU on a CPU of its own, according to the CPU plan of the host; ``realtime``:
    pinned, with the settings that real-time guests need; ``numa_node``: the NUMA node to use.
    """

    pin: Flag = False
    realtime: Flag = False
    numa_node: Annotated[int, Field(ge=0, le=1023, strict=True)] | None = None


class RenderRequest(Value):
    """A libvirt domain XML to complete with the VM's interfaces and the elements that they require."""

    xml: Annotated[str, StringConstraints(max_length=1_000_000)]
    policy: DomainPolicy = DomainPolicy()


class CheckRequest(Value):
    """The XML of an existing libvirt domain to check."""

    xml: Annotated[str, StringConstraints(max_length=1_000_000)]


class RenderedDomain(Value):
    xml: str
