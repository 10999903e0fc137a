"""The kernel command line as the kernel reads it: its words, and what each argument gives.

Files named here are Linux's: ``next_arg`` in lib/cmdline.c splits words, ``parameq`` in kernel/params.c
compares names, ``RULES`` has the file of each argument.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Final, NamedTuple

from netplugin.host.cpus import numbers, span

#: Bytes that x86 and arm64 keep of what a boot loader passes (COMMAND_LINE_SIZE in asm/setup.h, less one).
KEPT: Final = 2047
#: White space in quotes does not end a word; a quote without a second one reaches to the end.
_WORD = re.compile(r'(?:[^ \t\n\v\f\r"]|"[^"]*(?:"|\Z))+')
#: Units of ``memparse`` in lib/cmdline.c.
_UNITS: Final = {"": 0, **{unit: 10 * power for power, unit in enumerate("kmgtpe", start=1)}}
PAGES: Final = ("default_hugepagesz", "hugepagesz", "hugepages")


class Rule(NamedTuple):
    """``adds``: each occurrence of the argument adds a word (or a list, with ``comma``); otherwise the last
    counts. Of the words in ``either`` the last counts; with one of ``off`` no other has an effect.
    ``switch`` is the argument that is true or false for the same setting, perhaps this one: what it gives
    counts as the first or the second of ``either``, 1 or 0 if there is none."""

    source: str
    adds: bool = False
    comma: bool = False
    either: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    switch: str = ""


#: ``kstrtobool`` in lib/kstrtox.c looks at no more than this.
_SWITCH = re.compile(r"(?i)(?P<on>[yt1]|on)|[nf0]|of")
_PASS: Final = "iommu.passthrough"
_ONE: Final = Rule("kernel/params.c, parse_one")

#: Arguments that netplugin writes. For those without another rule the last occurrence counts.
RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        # The first valid one counts, for each kind of isolation: ``CommandLine.isolation``.
        **dict.fromkeys(("isolcpus", "nohz_full"), Rule("kernel/sched/isolation.c, housekeeping_setup")),
        # The first valid default, and numbers of pages of the size before: ``CommandLine.hugepages``.
        **dict.fromkeys(PAGES, Rule("mm/hugetlb.c, hugepages_setup")),
        # An invalid list means all CPUs, and nohz_full adds its own.
        "rcu_nocbs": Rule("kernel/rcu/tree_nocb.h, rcu_nocb_setup, rcu_init_nohz"),
        # The CPU that boots is added.
        "irqaffinity": Rule("kernel/irq/irqdesc.c, irq_affinity_setup"),
        "iommu": Rule("arch/x86/kernel/pci-dma.c, iommu_setup", True, True, ("pt", "nopt"), ("off",), _PASS),
        "intel_iommu": Rule("drivers/iommu/intel/iommu.c, intel_iommu_setup", True, True, ("on", "off")),
        _PASS: Rule("drivers/iommu/iommu.c, iommu_set_def_domain_type", switch=_PASS),
        "amd_iommu": Rule("drivers/iommu/amd/init.c, parse_amd_iommu_options", True, True),
        "mce": Rule("arch/x86/kernel/cpu/mce/core.c, mcheck_enable", True, off=("off",)),
        "tsc": Rule("arch/x86/kernel/tsc.c, tsc_setup", True, off=("unstable",)),
        "idle": Rule("arch/x86/kernel/process.c, idle_setup", True),
        "intel_pstate": Rule("drivers/cpufreq/intel_pstate.c, intel_pstate_setup", True),
        "amd_pstate": Rule("drivers/cpufreq/amd-pstate.c, amd_pstate_param"),
        "clocksource": Rule("kernel/time/clocksource.c, boot_override_clocksource"),
        **dict.fromkeys(("intel_idle.max_cstate", "processor.max_cstate", "pcie_aspm.policy"), _ONE),
    }
)


@dataclass(frozen=True)
class Machine:
    """What a command line is read for: number of CPU ids (``nr_cpu_ids``), CPUs that are there, hugepage
    sizes, NUMA nodes with memory, and what the numbers of nodes in ``hugepages`` must be below: 0 if it has
    none. Source: ``hugepages_setup`` in mm/hugetlb.c."""

    cpu_ids: int
    cpus: frozenset[int]
    sizes_kb: tuple[int, ...]
    nodes: tuple[int, ...]
    node_limit: int = 1024

    @property
    def default_kb(self) -> int:
        """HPAGE_SIZE: 2 MB, and on ARM what one page table of its base pages spans."""
        first = next((size for size in (524288, 64, 32768) if size in self.sizes_kb), 64)
        return 2048 if first == 64 else first


@dataclass(frozen=True)
class Hugepages:
    """Hugepages that a command line reserves: by size in KB and node. ``default_kb`` is None if no valid
    ``default_hugepagesz`` is given; ``sizes_kb`` are those that any argument names."""

    default_kb: int | None = None
    sizes_kb: frozenset[int] = frozenset()
    pages: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandLine:
    """Arguments in order; one without ``=`` has the value None."""

    arguments: tuple[tuple[str, str | None], ...]

    def values(self, name: str) -> tuple[str, ...]:
        """Values of all occurrences, in any spelling; one without ``=`` is empty."""
        rule, found = RULES.get(name, _ONE), []
        for key, value in self.arguments:
            if _spelled(key) == rule.switch:
                on = _SWITCH.match(value or "")
                found += [(rule.either or ("1", "0"))[not on["on"]]] if on else []
            elif _spelled(key) == _spelled(name):
                found.append(value or "")
        return tuple(found)

    def value(self, name: str) -> str | None:
        """What the argument gives, by its rule; None if absent, empty for one without ``=``."""
        values, rule = self.values(name), RULES.get(name, _ONE)
        if not values:
            return None
        return ",".join(_added(rule, values)) if rule.adds else values[-1]

    def gives(self, name: str, value: str) -> bool:
        """Whether the line gives an argument this value, perhaps among others."""
        rule = RULES.get(name, _ONE)
        if not rule.adds:
            return self.value(name) == value
        words = _added(rule, self.values(name))
        return value in words and words.keys().isdisjoint(rule.off)

    def isolation(self, machine: Machine) -> Mapping[str, frozenset[int]]:
        """CPUs of ``domain``, ``managed_irq`` and ``nohz`` (nohz_full) that are isolated."""
        found: dict[str, frozenset[int]] = {}
        for key, value in self.arguments:
            if value is not None and (name := _spelled(key)) in ("isolcpus", "nohz_full"):
                flags, cpus = _flagged(value) if name == "isolcpus" else (frozenset({"nohz"}), value)
                _isolate(found, flags, cpus, machine)
        return found

    def written_isolcpus(self, cpu_ids: int) -> frozenset[int]:
        """CPUs that isolcpus names, whatever its flags do with them."""
        found: frozenset[int] = frozenset()
        for value in self.values("isolcpus"):
            with suppress(ValueError):
                found |= parse_cpus(_flagged(value)[1], cpu_ids)
        return found

    def rcu_nocbs(self, machine: Machine, nohz: Collection[int]) -> frozenset[int]:
        """CPUs whose RCU callbacks run elsewhere, given those of nohz_full."""
        values = self.values("rcu_nocbs")
        try:
            listed = parse_cpus(values[-1], machine.cpu_ids) if values else frozenset()
        except ValueError:
            listed = machine.cpus
        return listed & machine.cpus | frozenset(nohz)

    def hugepages(self, machine: Machine) -> Hugepages:
        state = _Pages(machine)
        takes = dict(zip(PAGES, (state.set_default, state.name_size, state.count), strict=True))
        for key, value in self.arguments:
            if value is not None and (take := takes.get(_spelled(key))):
                take(value)
        return state.result()


def parse_command_line(text: str) -> CommandLine:
    """Parse a command line up to ``--``; the words after it belong to init. /proc/cmdline has what the kernel
    kept, which may be more than ``KEPT`` with a boot configuration."""
    arguments = map(_argument, _WORD.findall(text))
    return CommandLine(tuple(takewhile(lambda argument: argument != ("--", None), arguments)))


def _argument(word: str) -> tuple[str, str | None]:
    """Split a word; quotes around all of it or around its value are dropped."""
    body = word.removeprefix('"')
    at = body.find("=", 1)
    name, value = (body, None) if at < 0 else (body[:at], body[at + 1 :])
    inner = value is not None and value.startswith('"')
    if value is not None and inner:
        value = value[1:]
    if (inner or body != word) and body.endswith('"'):
        return (name[:-1], None) if value is None else (name, value[:-1])
    return name, value


def _spelled(name: str) -> str:
    return name.replace("-", "_")


def _added(rule: Rule, values: Collection[str]) -> dict[str, None]:
    """Words that count, in order, without repetitions."""
    words: dict[str, None] = {}
    for value in values:
        for word in filter(None, value.split(",") if rule.comma else [value]):
            if word in rule.either:
                words = {kept: None for kept in words if kept not in rule.either}
            words[word] = None
    return words


def spelling(name: str) -> str:
    """An argument in any spelling, as a regular expression."""
    return "".join("[-_]" if char in "-_" else re.escape(char) for char in name)


def contradicting(name: str, value: str) -> str | None:
    """Of an argument whose words add up, those that a boot loader's file must not have besides new ones, as a
    regular expression: the one with this value and those that undo it, ``@`` for a quote. None for other
    arguments, of which only one occurrence counts."""
    rule = RULES.get(name, _ONE)
    if not rule.adds:
        return None
    undone = "|".join(map(re.escape, sorted({*rule.either, *rule.off} - {value})))
    other = r"""[^\s"',\\]+"""
    among = rf"(?:{other},)*(?:{undone})(?:,{other})*" if rule.comma else undone
    words = "|".join(filter(None, [re.escape(value), undone and among]))
    switch = f"|{spelling(rule.switch)}=(?:@)?{other}(?:@)?" if rule.switch else ""
    return f"{spelling(name)}=(?:@)?(?:{words})(?:@)?{switch}"


_NUMBER = r"(?:N|[0-9]{1,9})"
_REGION = re.compile(rf"(?:(?P<all>(?i:all))|(?P<first>{_NUMBER})(?:-(?P<last>{_NUMBER}))?)"
                     rf"(?::(?P<used>{_NUMBER})/(?P<group>{_NUMBER}))?")  # fmt: skip


def parse_cpus(text: str, cpu_ids: int) -> frozenset[int]:
    """Parse a list like ``0-30:1/2,all,N`` (``bitmap_parselist`` in lib/bitmap-str.c). Raises: ValueError."""
    bits = 0
    for part in filter(None, re.split(r"[,\s]", text)):
        found = _REGION.fullmatch(part)
        if found is None or (found["used"] and found["first"] and not found["last"]):
            raise ValueError(f"{part[:40]!r} is neither a CPU nor a range of CPUs")
        given = ("0", "N", *found.group("used", "group")) if found["all"] else found.groups()[1:]
        first, last, used, group = (cpu_ids - 1 if each == "N" else int(each or 0) for each in given)
        last = last if given[1] else first
        if last >= cpu_ids:
            raise ValueError(f"{part} is beyond CPU {cpu_ids - 1}")
        region = span(first, last)
        if given[2]:
            if not group or used > group:
                raise ValueError(f"{part}: {used} of {group}")
            region = sum(1 << cpu for cpu in numbers(region) if (cpu - first) % group < used)
        bits |= region
    return frozenset(numbers(bits))


def _flagged(value: str) -> tuple[frozenset[str], str]:
    """Split the flags off the list of isolcpus (housekeeping_isolcpus_setup). An unknown flag is skipped; one
    that is no word makes the list invalid."""
    flags = set()
    while value[:1].isalpha():
        flag, comma, value = value.partition(",")
        if comma and flag in ("nohz", "domain", "managed_irq"):
            flags.add(flag)
        elif not re.fullmatch("[A-Za-z_]+", flag):
            return frozenset(), ""
    return frozenset(flags or {"domain"}), value


def _isolate(found: dict[str, frozenset[int]], flags: frozenset[str], text: str, machine: Machine) -> None:
    try:
        cpus = parse_cpus(text, machine.cpu_ids)
    except ValueError:
        return
    if machine.cpus <= cpus:  # one has to be left, the one that boots
        cpus -= {min(machine.cpus, default=0)}
    if not cpus or any(found.get(flag, cpus) != cpus for flag in flags):
        return
    before = next((found[kind] for kind in ("domain", "nohz") if kind in found), frozenset())
    if flags & {"domain", "nohz"} and machine.cpus <= cpus | before:
        return
    found |= dict.fromkeys(flags, cpus)


class _Pages:
    """Hugepages, in the order in which the arguments come (mm/hugetlb.c since 5.8). ``valid``: the size
    before was. ``size`` is None until one is named; a number then counts pages of the default size.
    ``counted`` is the last size with a number, 0 at first."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._valid = True
        self._size: int | None = None
        self._default: int | None = None
        self._counted: int | None = 0
        self._pages: dict[int | None, dict[int | None, int]] = {}

    def set_default(self, value: str) -> None:
        size = memory_kb(value)
        self._valid = self._default is None and size in self._machine.sizes_kb
        if size is None or not self._valid:
            return
        self._default = size
        if size not in self._pages:
            self._pages[size] = {}
            self._size = size
        first = self._pages.pop(None, {})
        if any(first.values()):
            self._pages[size] = first

    def name_size(self, value: str) -> None:
        size = memory_kb(value)
        # The default may be named once more, before its pages are counted.
        again = size == self._default and not any(self._pages.get(size, {}).values())
        self._valid = size in self._machine.sizes_kb and (again or size not in self._pages)
        if self._valid:
            self._pages.setdefault(size, {})
            self._size = size

    def count(self, value: str) -> None:
        if not self._valid:
            self._valid = True
            return
        if self._counted == self._size:
            return
        self._pages[self._size] = {}
        with suppress(ValueError):
            self._pages[self._size] = _counts(value, self._machine)
            self._counted = self._size

    def result(self) -> Hugepages:
        sizes = frozenset(size for size in self._pages if size is not None)
        if any(self._pages.get(None, {}).values()):  # no default was named
            self._pages[self._machine.default_kb] = self._pages[None]
        pages = {size: self._spread(counts) for size, counts in self._pages.items() if size is not None}
        return Hugepages(self._default, sizes, {size: counts for size, counts in pages.items() if counts})

    def _spread(self, counts: Mapping[int | None, int]) -> dict[int, int]:
        """By node; a plain number goes evenly to all nodes with memory. The others get none."""
        nodes = self._machine.nodes
        if None not in counts:
            return {node: pages for node in nodes if (pages := counts.get(node))}
        each, more = divmod(counts[None], max(1, len(nodes)))
        spread = {node: each + (at < more) for at, node in enumerate(nodes)}
        return {node: pages for node, pages in spread.items() if pages}


def _counts(value: str, machine: Machine) -> dict[int | None, int]:
    """Numbers by node; a plain one has the node None. Raises: ValueError."""
    if not machine.node_limit:
        return {None: _leading(value)[0]}
    found: dict[int | None, int] = {}
    rest = value
    while rest:
        number, rest = _leading(rest)
        if not rest.startswith(":"):
            if found:
                raise ValueError(f"{value}: a number without a node")
            return {None: number}
        if number >= machine.node_limit:
            raise ValueError(f"{value}: no node {number}")
        found[number], rest = _leading(rest[1:])
        if not rest.startswith(","):
            break
        rest = rest[1:]
    return found


def _leading(text: str) -> tuple[int, str]:
    """The number that a text begins with, and the rest. Raises: ValueError."""
    digits = re.match(r"[0-9]+", text)
    if digits is None:
        raise ValueError(f"{text[:40]!r} does not begin with a number")
    return int(digits[0]), text[digits.end() :]


def memory_kb(text: str) -> int | None:
    """A size in KB; None if it is not a multiple of one (``memparse``)."""
    found = re.match(r"(0[xX][0-9a-fA-F]+|[0-9]+)([kmgtpeKMGTPE]?)", text)
    if found is None:
        return None
    digits = found[1]
    octal = digits[0] == "0" and digits[1:2] not in ("x", "X")
    try:
        size = int(digits, 8 if octal else 0) << _UNITS[found[2].lower()]
    except ValueError:  # 08
        return None
    return size >> 10 if size & 1023 == 0 else None


def page_name(size_kb: int) -> str:
    """Page size in the notation of ``hugepagesz``: ``1G``, ``512M``, ``64K``."""
    for unit, power in (("G", 20), ("M", 10)):
        if size_kb % (1 << power) == 0:
            return f"{size_kb >> power}{unit}"
    return f"{size_kb}K"
