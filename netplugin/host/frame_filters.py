"""What the packet filters of other programs do with a frame: rules as values, and their judgement (pure).

What is not known of a frame, as an address, or what a rule asks that is not understood here, may be true or
not. So a filter drops a frame, or does not, or may do so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

#: Length of the name of a device in the kernel (IFNAMSIZ).
NAME_BYTES = 16
#: Rules that are looked at for one frame, and chains that call each other. With more, it is not judged.
_MOST_RULES, _MOST_CALLS = 5_000, 64

#: What of a frame a rule asks for: the kind of expression, and the numbers of nf_tables.h that say which.
Key = tuple[str | int, ...]
#: What is known of the frames that are judged together.
Frame = dict[Key, bytes]


class Then(Enum):
    """What a rule or chain does with a frame. ``NEXT``: the calling chain goes on."""

    ACCEPT = "accept"
    DROP = "drop"
    NEXT = "next"
    #: Not to be seen in the rules, such as what a program in user space decides.
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FrameCondition:
    """Whether what ``key`` says is in one of ``ranges`` (first, last) or, with ``inside`` False, in none.

    Of the frame's bytes as many as those of a range are compared. By default it may be true or not.
    """

    key: Key | None = None
    ranges: tuple[tuple[bytes, bytes], ...] = ((b"", b""),)
    inside: bool = True
    #: Of the frame's bytes, the bits that are compared; empty: all.
    mask: bytes = b""

    def holds(self, frame: Frame) -> bool | None:
        """Return None if it may be true or not."""
        if not self.ranges:
            return not self.inside
        value = frame.get(self.key) if self.key else None
        if value is not None and self.mask:
            value = bytes(v & m for v, m in zip(value, self.mask, strict=False))
        if value is None or len(value) < len(self.ranges[0][1]):
            return None
        return any(low <= value[: len(high)] <= high for low, high in self.ranges) == self.inside


@dataclass(frozen=True, slots=True)
class FrameVerdict:
    """``chain``: go through it first. ``leaves``: do not come back to this one, or leave it (``return``)."""

    then: Then
    chain: str = ""
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class FrameRule:
    """What becomes of frames that meet all conditions. ``number``: its place in the chain, from 1.

    A map of verdicts becomes one of these for each of its keys.
    """

    number: int
    conditions: tuple[FrameCondition, ...]
    verdict: FrameVerdict

    def applies(self, frame: Frame) -> bool | None:
        """Return None if it may apply or not."""
        sure: bool | None = True
        for condition in self.conditions:
            holds = condition.holds(frame)
            if holds is False:
                return False
            sure = sure and holds
        return sure


@dataclass(frozen=True)
class Filters:
    """A table of another program, of a family as nft names it. ``legacy``: of iptables-legacy."""

    family: str
    name: str
    legacy: bool = False
    chains: Mapping[str, tuple[FrameRule, ...]] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"table {self.family} {self.name}{' (legacy)' * self.legacy}"

    def conditions(self) -> Iterator[FrameCondition]:
        return (each for rules in self.chains.values() for rule in rules for each in rule.conditions)


@dataclass(frozen=True)
class BaseChain:
    """A chain that the kernel calls at a hook, by nft's name. ``devices``: those that it belongs to."""

    hook: str
    chain: str
    policy: Then
    table: Filters
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"chain {self.chain} of {self.table}"


def judge(base: BaseChain, frame: Frame | None) -> tuple[Then, str]:
    """Say what a chain does with a frame (None: it does not pass it), and which chain or rule drops it.

    OTHER if the rules do not decide it.
    """
    if frame is None:
        return Then.ACCEPT, ""
    found = dict(_Judge(base.table, frame).chain(base.chain, 1))
    if found.pop(Then.NEXT, None) is not None:
        found.setdefault(base.policy, f"the policy of {base}")
    if len(found) == 1 and Then.OTHER not in found:
        return found.popitem()
    return Then.OTHER, found.get(Then.DROP) or found.get(Then.OTHER) or str(base)


class _Judge:
    def __init__(self, table: Filters, frame: Frame) -> None:
        self._table = table
        self._frame = frame
        self._known: dict[str, dict[Then, str]] = {}
        self._rules = 0

    def chain(self, name: str, calls: int) -> dict[Then, str]:
        """Return what can become of a frame in a chain, each with the last place that does it."""
        if name not in self._known:
            self._known[name] = self._of(name, calls)
        return self._known[name]

    def _of(self, name: str, calls: int) -> dict[Then, str]:
        found: dict[Then, str] = {}
        for rule in self._table.chains.get(name, ()):
            self._rules += 1
            if self._rules > _MOST_RULES or calls > _MOST_CALLS:
                return {Then.OTHER: f"chain {name} of {self._table}, where too many rules come together"}
            applies = rule.applies(self._frame)
            if applies is False:
                continue
            verdict = rule.verdict
            if verdict.chain:
                results = self.chain(verdict.chain, calls + 1)
            else:
                results = {verdict.then: f"rule {rule.number} of chain {name} of {self._table}"}
            found |= {t: w for t, w in results.items() if t is not Then.NEXT or verdict.leaves}
            if applies and (Then.NEXT not in results or verdict.leaves):
                return found
        found[Then.NEXT] = ""
        return found


def device(name: str) -> bytes:
    """The name of a device as rules compare it."""
    return name.encode()[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")
