"""Metadata mark of a placed domain: netplugin wrote its pins and may replace them."""

from __future__ import annotations

from typing import Final

from lxml import etree

from netplugin.domain_xml import child
from netplugin.libvirt_xml import Element

NAMESPACE: Final = "urn:netplugin:placed"
_TAG: Final = f"{{{NAMESPACE}}}placed"


def is_marked(domain: Element) -> bool:
    return domain.find(f"metadata/{_TAG}") is not None


def is_marked_realtime(domain: Element) -> bool:
    mark = domain.find(f"metadata/{_TAG}")
    return mark is not None and mark.get("realtime") == "yes"


def mark(domain: Element, realtime: bool) -> None:
    """Set the mark in ``<metadata>``, where libvirt keeps one element per foreign namespace."""
    found = domain.find(f"metadata/{_TAG}")
    if found is None:
        found = etree.SubElement(child(domain, "metadata"), _TAG, nsmap={"netplugin": NAMESPACE})
    found.set("realtime", "yes" if realtime else "no")
