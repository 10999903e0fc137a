"""What the packet filters of other programs do with a frame: rules as values, and their judgement (pure).

A rule is judged with what is known of a frame: the devices, the protocol, that it begins a connection.
What is not known, as an address, or what a rule asks that is not understood here, may be true or not. So a
filter drops a frame, or does not, or may do so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

#: Length of the name of a device in the kernel (IFNAMSIZ).
NAME_BYTES = 16
#: Rules that are looked at for one frame, and chains that call each other. With more, it is not judged.
_MOST_RULES, _MOST_CALLS = 5_000, 64


class Then(Enum):
    """What a rule or chain does with a frame. ``NEXT``: the calling chain goes on."""

    ACCEPT = "accept"
    DROP = "drop"
    NEXT = "next"
    #: Not to be seen in the rules, such as what a program in user space decides.
    OTHER = "other"


#: What a rule asks for: the kind of expression, and the numbers that say which (as in nf_tables.h).
Key = tuple[str, int, int, int]


def meta(key: int) -> Key:
    return ("meta", key, 0, 0)


def connection(key: int) -> Key:
    return ("ct", key, 0, 0)


def payload(base: int, offset: int, length: int) -> Key:
    return ("payload", base, offset, length)


@dataclass(frozen=True)
class Frame:
    """What is known of the frames that are judged together.

    ``physical_in`` and ``physical_out`` are the ports of the bridge, for rules of iptables that ask for
    them (xt_physdev); None if not known.
    """

    known: Mapping[Key, bytes]
    bridged: bool = False
    physical_in: str | None = None
    physical_out: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Load what is known of the frame into a register; ``key`` None: it is never known."""

    register: int
    key: Key | None


@dataclass(frozen=True, slots=True)
class Set:
    """Set a register to a constant."""

    register: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Mask:
    """Compute ``(source & mask) ^ xor``."""

    source: int
    target: int
    mask: bytes
    xor: bytes


@dataclass(frozen=True, slots=True)
class Between:
    """Go on if the register is from ``low`` to ``high`` (None: no limit); ``inside`` False: if it is not."""

    register: int
    low: bytes | None
    high: bytes | None
    inside: bool = True


@dataclass(frozen=True, slots=True)
class Lookup:
    """Go on if the set has the register's value; do what a verdict map has for it."""

    register: int
    name: str
    inside: bool = True
    is_verdict: bool = False


@dataclass(frozen=True, slots=True)
class Physical:
    """The match ``physdev`` of iptables: prefixes of the names, and the flags of xt_physdev.h."""

    physical_in: bytes
    physical_out: bytes
    flags: int
    inverted: int


@dataclass(frozen=True, slots=True)
class Maybe:
    """A condition that is not understood here."""


@dataclass(frozen=True, slots=True)
class Never:
    """A condition that no frame meets which begins a connection."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``chain``: jump there first, or with ``goto`` do not come back."""

    then: Then
    chain: str = ""
    goto: bool = False
    #: Leave the chain, as ``return`` does.
    leave: bool = False


Step = Load | Set | Mask | Between | Lookup | Physical | Maybe | Never | Verdict
Rule = tuple[Step, ...]


@dataclass(frozen=True)
class KnownSet:
    """A set or map: ranges of keys (first, last) with the verdicts of a verdict map."""

    ranges: tuple[tuple[bytes, bytes, Verdict | None], ...]


@dataclass(frozen=True)
class Filters:
    """A table of another program, of a family as nft names it. A set that is not here is not known.

    ``legacy``: of iptables-legacy.
    """

    family: str
    name: str
    legacy: bool = False
    chains: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    sets: Mapping[str, KnownSet] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"table {self.family} {self.name}{' (legacy)' * self.legacy}"

    def constants(self) -> Iterator[bytes]:
        """The bytes that rules compare with: what is not among them makes no difference to a rule."""
        for rules in self.chains.values():
            for step in (step for rule in rules for step in rule):
                if isinstance(step, Between):
                    yield from (each for each in (step.low, step.high) if each)
                elif isinstance(step, Physical):
                    yield from (step.physical_in, step.physical_out)
        for known in self.sets.values():
            for low, high, _ in known.ranges:
                yield from (low, low.rstrip(b"\0"), high)


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


@dataclass(frozen=True)
class Judgement:
    """``then`` is OTHER if the rules do not decide it. ``where`` names the chain or rule that drops."""

    then: Then
    where: str = ""


def judge(base: BaseChain, frame: Frame) -> Judgement:
    """Say what a chain does with a frame."""
    return _Judge(base, frame).judge()


_Found = dict[Then, str]


class _Judge:
    def __init__(self, base: BaseChain, frame: Frame) -> None:
        self._base = base
        self._frame = frame
        self._chains: dict[str, _Found] = {}
        self._rules = self._calls = 0

    def judge(self) -> Judgement:
        found = self._chain(self._base.chain)
        end = found.pop(Then.NEXT, None)
        if end is not None:
            found.setdefault(self._base.policy, f"the policy of {self._base}")
        if found.keys() == {Then.ACCEPT}:
            return Judgement(Then.ACCEPT)
        if found.keys() == {Then.DROP}:
            return Judgement(Then.DROP, found[Then.DROP])
        return Judgement(Then.OTHER, found.get(Then.DROP) or found.get(Then.OTHER) or str(self._base))

    def _chain(self, name: str) -> _Found:
        if name not in self._chains:
            if self._calls == _MOST_CALLS:
                return {Then.OTHER: f"chain {name} of {self._base.table}, which is called too deep"}
            self._calls += 1
            self._chains[name] = self._of(name)
            self._calls -= 1
        return self._chains[name]

    def _of(self, name: str) -> _Found:
        """What can become of a frame in a chain, each with the last place that does it."""
        found: _Found = {}
        for number, rule in enumerate(self._base.table.chains.get(name, ()), 1):
            self._rules += 1
            if self._rules > _MOST_RULES:
                return {Then.OTHER: f"{self._base}, which has too many rules"}
            sure, verdicts = self._rule(rule)
            where = f"rule {number} of chain {name} of {self._base.table}"
            ends = False
            for verdict in verdicts:
                results = self._chain(verdict.chain) if verdict.chain else {verdict.then: where}
                comes_back = Then.NEXT in results and not verdict.leave and not verdict.goto
                found.update({then: w for then, w in results.items() if then is not Then.NEXT})
                if Then.NEXT in results and not comes_back:
                    found[Then.NEXT] = ""
                ends = not comes_back
            if sure and len(verdicts) == 1 and ends:
                return found
        found[Then.NEXT] = ""
        return found

    def _rule(self, rule: Rule) -> tuple[bool, list[Verdict]]:
        """Whether the rule surely applies, and its possible verdicts; none if it does not apply."""
        sure, registers = True, dict[int, bytes | None]()
        for step in rule:
            holds: bool | None = True
            match step:
                case Verdict():
                    return sure, [step]
                case Load(register, key):
                    registers[register] = self._frame.known.get(key) if key else None
                case Set(register, value):
                    registers[register] = value
                case Mask(source, target, mask, xor):
                    registers[target] = _masked(registers.get(source), mask, xor)
                case Between(register, low, high, inside):
                    holds = _between(registers.get(register), low, high, inside)
                case Lookup(register, name, inside, is_verdict):
                    known, value_ = self._base.table.sets.get(name), registers.get(register)
                    if is_verdict:
                        verdicts = _verdicts(known, value_)
                        if len(verdicts) == 1 and value_ is not None:
                            return sure, verdicts
                        return False, verdicts
                    holds = _member(known, value_, inside)
                case Physical():
                    holds = _physical(step, self._frame)
                case Maybe():
                    holds = None
                case Never():
                    holds = False
            if holds is False:
                return True, []
            sure = sure and holds is True
        return sure, []


def _masked(value: bytes | None, mask: bytes, xor: bytes) -> bytes | None:
    if value is None or len(value) < len(mask) or len(mask) != len(xor):
        return None
    return bytes((v & m) ^ x for v, m, x in zip(value, mask, xor, strict=False))


def _between(value: bytes | None, low: bytes | None, high: bytes | None, inside: bool) -> bool | None:
    length = len(low or high or b"")
    if value is None or len(value) < length:
        return None
    part = value[:length]
    return ((low is None or low <= part) and (high is None or part <= high)) == inside


def _member(known: KnownSet | None, value: bytes | None, inside: bool) -> bool | None:
    if known is not None and not known.ranges:
        return not inside
    if known is None or value is None:
        return None
    return (_range_of(known, value) is not None) == inside


def _verdicts(known: KnownSet | None, value: bytes | None) -> list[Verdict]:
    if known is None:
        return [Verdict(Then.OTHER)]
    if value is None:
        return list(dict.fromkeys(verdict for *_, verdict in known.ranges if verdict))
    found = _range_of(known, value)
    return [found[2]] if found and found[2] else []


def _range_of(known: KnownSet, value: bytes) -> tuple[bytes, bytes, Verdict | None] | None:
    for each in known.ranges:
        if each[0] <= value[: len(each[0])].ljust(len(each[0]), b"\0") <= each[1]:
            return each
    return None


#: include/uapi/linux/netfilter/xt_physdev.h
_IN, _OUT, _BRIDGED, _IS_IN, _IS_OUT = 1, 2, 4, 8, 16


def _physical(step: Physical, frame: Frame) -> bool | None:
    if not frame.bridged:
        return None
    answers: list[bool | None] = []
    for flag in (_BRIDGED, _IS_IN, _IS_OUT):
        if step.flags & flag:
            answers.append(not step.inverted & flag)
    for flag, prefix, name in (
        (_IN, step.physical_in, frame.physical_in),
        (_OUT, step.physical_out, frame.physical_out),
    ):
        if step.flags & flag:
            fits = None if name is None else device(name).startswith(prefix)
            answers.append(None if fits is None else fits != bool(step.inverted & flag))
    if False in answers:
        return False
    return None if None in answers else True


def device(name: str) -> bytes:
    """The name of a device as rules compare it."""
    return name.encode()[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")


def told_apart(chains: Collection[BaseChain]) -> Callable[[str, int], frozenset[bytes]]:
    """Return a function of a device's name and index: no rule tells devices with equal results apart."""
    constants = {constant for chain in chains for constant in chain.table.constants()}
    constants |= {device(name) for chain in chains for name in chain.devices}

    def of(name: str, index: int) -> frozenset[bytes]:
        padded = device(name)
        asked = {padded[:length] for length in range(1, NAME_BYTES + 1)}
        return frozenset((asked | {struct.pack("=I", index)}) & constants)

    return of
