"""Place a domain (pure): refuse conflicts, choose the placement, write it, add the NICs."""

from __future__ import annotations

from collections.abc import Sequence

from netplugin.domain_xml import RENDER, complete, nodes_asked
from netplugin.libvirt_xml import Element
from netplugin.models import Binding, DomainPolicy
from netplugin.placing.ground import Ground, Held
from netplugin.placing.needs import read_needs
from netplugin.placing.place import place
from netplugin.placing.placement import Placement
from netplugin.placing.refusals import own_nodes, refuse_own_pins, refuse_unplaceable
from netplugin.placing.write import write


def render_placed(
    domain: Element,
    bindings: Sequence[Binding],
    policy: DomainPolicy,
    ground: Ground,
    others: Held,
    before: Placement | None = None,
) -> Placement:
    """Modify the domain in place and return its placement; ``before`` is its previous one.

    Raises: Conflict, InvalidRequest, Unsupported for the domain's content; CapacityExhausted.
    """
    refuse_unplaceable(domain, ground, policy.realtime)
    needs = read_needs(domain, RENDER)
    nodes = nodes_asked(bindings, policy) | own_nodes(domain)
    near = {node for binding in bindings if (node := home(binding)) is not None}
    placement = place(needs, ground, others, nodes, near, before)
    refuse_own_pins(domain, placement, needs.iothreads)
    write(domain, placement, needs.iothreads, policy.realtime)
    complete(domain, bindings)
    return placement


def home(binding: Binding) -> int | None:
    """The NUMA node of a port's device, as for a VF; else the node that the binding requires, or None."""
    node = (binding.model_extra or {}).get("numa_node")
    return node if isinstance(node, int) else binding.domain_requirements.numa_node
