"""Read the values of libvirt's XML as libvirt does (pure): text, numbers, MAC addresses, sets of CPUs."""

from __future__ import annotations

import re
from typing import Final

from lxml import etree

from netplugin.host.cpus import LONGEST, numbers, span
from netplugin.libvirt.interfaces import Element

_STRING: Final = etree.XPath("string()")
#: The digits of ``strtoul`` by base: 0 means that a prefix tells octal and hexadecimal.
_DIGITS: Final = {10: r"[0-9]+", 0: r"0[xX][0-9a-fA-F]+|[0-9]+"}
#: Leading zeros included; 2^64 has 20 digits.
_MOST_DIGITS: Final = 32
_MAC: Final = re.compile(r"([0-9a-fA-F]{1,2}(?::[0-9a-fA-F]{1,2}){5})(?:\s.*)?\Z", re.S | re.A)
_PART: Final = re.compile(r"\s*(\^)?([0-9]{1,9})\s*(?:-\s*\+?([0-9]{1,9})\s*)?\Z", re.A)


def content(element: Element | None) -> str:
    """The string value, as XPath's ``string()``; empty without an element.

    A comment, a CDATA section or a child element within it ends nothing.
    """
    return "" if element is None else str(_STRING(element))


def replace_content(element: Element, text: str) -> None:
    """Set the string value."""
    del element[:]
    element.text = text


def unsigned(text: str, base: int = 10) -> int | None:
    """Parse a number; None if libvirt refuses it (``virStrToLong_ui``).

    As ``strtoul``, it takes white space and a sign before the number, and libvirt takes nothing after it.
    """
    found = re.fullmatch(rf"\s*\+?({_DIGITS[base]})", text, re.A)
    if found is None or len(found[1]) > _MOST_DIGITS:
        return None
    digits = found[1]
    octal = base == 0 and digits.startswith("0") and digits.isdecimal()
    try:
        return int(digits, 8 if octal else base)
    except ValueError:  # an 8 or 9 in an octal number
        return None


def mac(text: str) -> str:
    """A MAC address in lower case with two digits each; empty if libvirt refuses it (``virMacAddrParse``)."""
    found = _MAC.match(text)
    return ":".join(part.zfill(2) for part in found[1].lower().split(":")) if found else ""


def pci_address(found: Element) -> str:
    """The PCI address in the attributes of an ``<address>``; empty if one is no number.

    Numbers are hexadecimal only after ``0x`` (``virPCIDeviceAddressParseXML``: strtoul with base 0).
    """
    read = [unsigned(found.get(name, "0"), 0) for name in ("domain", "bus", "slot", "function")]
    parts = [part for part in read if part is not None]
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*parts) if parts == read else ""


def bitmap(text: str) -> int:
    """The set of CPUs or nodes as the bits of a number; none if the text is blank.

    Source: ``virBitmapParse``; libvirt's formatdomain, "CPU Allocation": ``0-3,^2,8``.

    Raises: ValueError.
    """
    if len(text) > LONGEST:
        raise ValueError(f"has more than {LONGEST} characters")
    bits = 0
    parts = text.split(",")
    for part in parts[:-1] if not parts[-1].strip() else parts:
        found = _PART.match(part)
        if found is None or (found[1] and found[3]):
            raise ValueError(f"{part[:40]!r} is neither a CPU nor a range of CPUs")
        which = span(int(found[2]), int(found[3] or found[2]))
        bits = bits & ~which if found[1] else bits | which
    return bits


def parse_cpuset(text: str) -> frozenset[int]:
    """As ``bitmap``, as a set. Raises: ValueError."""
    return frozenset(numbers(bitmap(text)))
