"""A flow of an OVS bridge as a value, which is equal to the flow that is read back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from netplugin.host.flow_actions import NORMAL
from netplugin.host.oxm import fields_of

# Our cookies begin with "np"; the other 48 bits identify the owner of the flow.
COOKIE_MARK = 0x6E70 << 48

#: The bits of the mark.
MARK_MASK = 0xFFFF << 48

#: Idle and hard timeout in seconds, flags, importance (OpenFlow 1.4, section 7.3.4.1).
Options: TypeAlias = tuple[int, int, int, int]
_PLAIN: Options = (0, 0, 0, 0)
_TABLES = {f"table={number}": number for number in range(256)}


def is_marked(cookie: int) -> bool:
    """Whether a flow with this cookie is ours."""
    return cookie & MARK_MASK == COOKIE_MARK


@dataclass(frozen=True, slots=True)
class Flow:
    """One flow: what it matches (``netplugin.host.oxm``) and what it does (``flow_actions``).

    ``options`` are none in all of ours but the learned ones, so a flow that has some differs from ours.
    ``match`` has the words by which the flow was made, sorted; empty of one that was read.
    """

    cookie: int
    priority: int
    fields: bytes
    actions: bytes
    table: int = 0
    options: Options = _PLAIN
    match: str = field(default="", compare=False)

    @staticmethod
    @lru_cache(maxsize=2048)  # a batch makes the flows of its ports to write and to compare them
    def make(cookie: int, priority: int, match: str, actions: bytes = NORMAL) -> Flow:
        """A flow whose match is in the words of ovs-fields(7), and ``table=5`` if it is not table 0.

        Raises: Malformed.
        """
        words = [word for word in match.split(",") if word]
        table = next((_TABLES[word] for word in words if word in _TABLES), 0)
        fields = fields_of(word for word in words if word not in _TABLES)
        return Flow(cookie, priority, fields, actions, table, match=",".join(sorted(words)))

    @property
    def identity(self) -> tuple[int, int, bytes]:
        """What is unique on a bridge."""
        return self.table, self.priority, self.fields

    def __str__(self) -> str:
        return f"cookie={self.cookie:#x},priority={self.priority},{self.match or self.fields.hex()}"
