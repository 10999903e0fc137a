"""The kernel command line: its words, what each argument gives, and what a boot loader's file loses."""

from __future__ import annotations

import re

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.host.cpus import format_list
from netplugin.tuning.command_line import RULES, Machine, memory_kb, page_name, parse_command_line, parse_cpus
from netplugin.tuning.output.playbook_tasks import kernel_tasks
from netplugin.tuning.steps import Effect, Group, KernelArgument, Step

MB_2, GB_1 = 2048, 1048576
HOST = Machine(cpu_ids=8, cpus=frozenset(range(8)), sizes_kb=(MB_2, GB_1), nodes=(0, 1))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("a=1 quiet  b=\t-- c=3", [("a", "1"), ("quiet", None), ("b", "")]),
        ('a="x y" "b=x y" "c d" e="', [("a", "x y"), ("b", "x y"), ("c d", None), ("e", "")]),
        ('a=x"y z"w "b"=c d="x y', [("a", 'x"y z"w'), ('b"', "c"), ("d", "x y")]),
        ('=a =b=c "--" d', [("=a", None), ("=b", "c")]),
        ('"" "', [("", None), ("", None)]),
        (" --\n", []),
        ("a-- b=-- -- c", [("a--", None), ("b", "--")]),
    ],
)
def test_words_as_the_kernel_splits_them(text: str, arguments: list[tuple[str, str | None]]) -> None:
    assert list(parse_command_line(text).arguments) == arguments


@given(
    st.lists(st.tuples(st.from_regex(r"[a-z_.-]{1,8}", fullmatch=True), st.text("ab,:= -_'\t", max_size=9)))
)
def test_what_is_written_with_quotes_is_read(arguments: list[tuple[str, str]]) -> None:
    given = [(name, value) for name, value in arguments if name != "--"]
    for form in ('{}="{}"', '"{}={}"'):
        line = parse_command_line(" ".join(form.format(*each) for each in given))
        assert list(line.arguments) == given


def test_a_line_is_read_as_long_as_the_kernel_has_it() -> None:
    """What a boot loader passes is cut before; with a boot configuration there is more, and it counts."""
    line = parse_command_line(f"{'x' * 4080} isolcpus=2-3")
    assert line.isolation(HOST) == {"domain": {2, 3}} and len(line.arguments) == 2


@pytest.mark.parametrize(
    ("text", "value", "gives"),
    [
        ("iommu=pt", "pt", True),
        ("iommu=nopt iommu=force,pt", "force,pt", True),
        ("iommu=pt,nopt", "nopt", False),
        ("iommu=off iommu=pt", "off,pt", False),
        ("intel_iommu=off intel-iommu=on,sm_on", "on,sm_on", True),
        ("intel_iommu=on intel_iommu=off", "off", False),
        ("mce=ignore_ce mce=no_cmci", "ignore_ce,no_cmci", True),
        ("mce=ignore_ce,no_cmci", "ignore_ce,no_cmci", False),
        ("mce=ignore_ce mce=off", "ignore_ce,off", False),
        ("tsc=reliable tsc=unstable", "reliable,unstable", False),
        ("idle=poll idle=halt", "poll,halt", True),
        ("intel_pstate=active intel-pstate=disable", "active,disable", True),
        ("amd_pstate=active amd_pstate=disable", "disable", True),
        ("amd_iommu=fullflush,off amd_iommu=pgtbl_v2", "fullflush,off,pgtbl_v2", True),
        ("amd_pstate=disable amd-pstate=active", "active", False),
        ("iommu.passthrough=1 iommu.passthrough=0", "0", False),
        ("iommu.passthrough=0 iommu.passthrough=on iommu.passthrough", "1", True),
        ("processor.max-cstate=9 processor.max_cstate=1", "1", True),
        ("pcie_aspm.policy=performance", "performance", True),
        ("clocksource", "", False),
        ("quiet", None, False),
    ],
)
def test_an_argument_by_its_rule(text: str, value: str | None, gives: bool) -> None:
    desired = {"iommu": "pt", "intel_iommu": "on", "mce": "ignore_ce", "tsc": "reliable", "idle": "poll"}
    desired |= dict.fromkeys(("intel_pstate", "amd_pstate"), "disable") | {"clocksource": "tsc"}
    desired["amd_iommu"] = "off"
    desired |= {"iommu.passthrough": "1", "processor.max_cstate": "1", "pcie_aspm.policy": "performance"}
    name = parse_command_line(text).arguments[0][0].replace("-", "_").replace("quiet", "mce")
    line = parse_command_line(text)
    assert (line.value(name), line.gives(name, desired[name])) == (value, gives)


@pytest.mark.parametrize(
    ("text", "value", "gives"),
    [
        ("iommu.passthrough=Y intel_iommu=on", "pt", True),
        ("iommu=pt,force iommu.passthrough=off", "force,nopt", False),
        ("iommu.passthrough=0 iommu=pt iommu.passthrough=2", "pt", True),
        ("iommu=off iommu.passthrough=1", "off,pt", False),
    ],
)
def test_on_x86_two_arguments_set_whether_the_iommu_translates(text: str, value: str, gives: bool) -> None:
    line = parse_command_line(text)
    assert (line.value("iommu"), line.gives("iommu", "pt")) == (value, gives)


def test_another_argument_has_its_last_value() -> None:
    line = parse_command_line("a=1 b-c=3 a=2 b_c=4")
    assert (line.value("a"), line.values("b-c"), line.value("d")) == ("2", ("3", "4"), None)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-7:1/2", {0, 2, 4, 6}),
        ("1-6:2/3,7", {1, 2, 4, 5, 7}),
        ("all", set(range(8))),
        ("ALL:1/4", {0, 4}),
        ("N,2-N:N/N", {2, 3, 4, 5, 6, 7}),
        ("6-N", {6, 7}),
        (",,1, 2,", {1, 2}),
        ("", set()),
    ],
)
def test_a_list_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text, 8) == cpus


@pytest.mark.parametrize(
    "text", ["8", "5-2", "1-8", "1:1/2", "0-3:3/2", "0-3:0/0", "0-3:1", "x", "-1", "1-", "0x1"]
)
def test_a_list_that_the_kernel_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpus(text, 8)


@given(st.sets(st.integers(0, 7)))
def test_a_written_list_is_read(cpus: set[int]) -> None:
    assert parse_cpus(format_list(cpus), 8) == cpus


@pytest.mark.parametrize(
    ("text", "isolated"),
    [
        ("isolcpus=2-3 isolcpus=4-5", {"domain": "2-3"}),
        ("isolcpus=99 isolcpus=4-5", {"domain": "4-5"}),
        ("isolcpus= isolcpus=4", {"domain": "4"}),
        ("isolcpus", {}),
        ("isolcpus=managed_irq,domain,2-3", {"managed_irq": "2-3", "domain": "2-3"}),
        ("isolcpus=managed_irq,2-3 isolcpus=domain,4", {"managed_irq": "2-3", "domain": "4"}),
        ("isolcpus=managed_irq,2-3 isolcpus=managed_irq,domain,4", {"managed_irq": "2-3"}),
        ("isolcpus=managed_irq,2-3 isolcpus=managed_irq,domain,2,3", {"managed_irq": "2-3", "domain": "2-3"}),
        ("isolcpus=nohz,domain,2", {"nohz": "2", "domain": "2"}),
        ("isolcpus=other,domain,2", {"domain": "2"}),
        ("isolcpus=other,2", {"domain": "2"}),
        ("isolcpus=no-word,domain,2", {}),
        ("isolcpus=2,nohz", {}),
        ("isolcpus=all", {}),
        ("isolcpus=0-N", {"domain": "1-7"}),
        ("isolcpus=1-N:1/2", {"domain": "1,3,5,7"}),
        ("isolcpus=2-3 nohz-full=2-3", {"domain": "2-3", "nohz": "2-3"}),
        ("nohz_full=2-3 nohz_full=4", {"nohz": "2-3"}),
        ("nohz_full=all", {"nohz": "1-7"}),
        ("isolcpus=0-3 nohz_full=4-7", {"domain": "0-3"}),
        ('isolcpus="2 3"', {"domain": "2-3"}),
    ],
)
def test_isolation(text: str, isolated: dict[str, str]) -> None:
    found = parse_command_line(text).isolation(HOST)
    assert {kind: format_list(cpus) for kind, cpus in found.items()} == isolated


@given(
    st.lists(
        st.tuples(st.sampled_from(["isolcpus", "nohz_full"]), st.text("0123456789,-:/Nadlomin_", max_size=9))
    )
)
def test_at_least_one_cpu_is_not_isolated(arguments: list[tuple[str, str]]) -> None:
    line = parse_command_line(" ".join("=".join(each) for each in arguments))
    assert all(cpus and HOST.cpus - cpus for cpus in line.isolation(HOST).values())


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", "4"),
        ("rcu_nocbs=2 rcu-nocbs=3", "3-4"),
        ("rcu_nocbs", "4"),
        ("rcu_nocbs=9", "0-7"),
        ("rcu_nocbs=all", "0-7"),
    ],
)
def test_cpus_without_rcu_callbacks(text: str, cpus: str) -> None:
    assert format_list(parse_command_line(text).rcu_nocbs(HOST, {4})) == cpus


@pytest.mark.parametrize(
    ("text", "default", "pages"),
    [
        # A size counts for the numbers after it, and is named once; the default once more, before it has any.
        ("default_hugepagesz=1G hugepagesz=2M hugepages=16 hugepagesz=1G", "1G", {"2M": (8, 8)}),
        (
            "default_hugepagesz=1G hugepagesz=2M hugepages=4 hugepagesz=1G hugepages=16",
            "1G",
            {"2M": (2, 2), "1G": (8, 8)},
        ),
        ("default_hugepagesz=1G hugepages=16 hugepagesz=1G hugepages=2", "1G", {"1G": (8, 8)}),
        ("hugepagesz=1G hugepages=4 hugepagesz=1G hugepages=2", None, {"1G": (2, 2)}),
        (
            "hugepagesz=1G hugepages=16 hugepagesz=2M hugepages=512 default_hugepagesz=1G",
            "1G",
            {"1G": (8, 8), "2M": (256, 256)},
        ),
        ("hugepagesz=1G hugepages=16 default-hugepagesz=1G hugepages=2", "1G", {"1G": (8, 8)}),
        ("default_hugepagesz=2M default_hugepagesz=1G hugepages=2", "2M", {}),
        # Before any size, a number counts pages of the default one, wherever that is named.
        ("hugepages=16 default_hugepagesz=1G", "1G", {"1G": (8, 8)}),
        ("hugepages=16", None, {"2M": (8, 8)}),
        ("hugepages=16 hugepagesz=1G hugepages=4", None, {"2M": (8, 8), "1G": (2, 2)}),
        ("hugepages=16 hugepages=4", None, {"2M": (8, 8)}),
        ("hugepages=16 hugepagesz=2M hugepages=4", None, {"2M": (8, 8)}),
        # A size that the CPU lacks takes the number after it along, and no more.
        ("hugepagesz=512M hugepages=16", None, {}),
        ("hugepagesz=1G hugepagesz=512M hugepages=16 hugepages=4", None, {"1G": (2, 2)}),
        ("default_hugepagesz=3G default_hugepagesz=1G hugepages=4", "1G", {"1G": (2, 2)}),
        # By node, and what is no such list.
        ("hugepagesz=1G hugepages=0:4,1:2", None, {"1G": (4, 2)}),
        ("hugepagesz=1G hugepages=1:4,", None, {"1G": (0, 4)}),
        ("hugepages=1:3 default_hugepagesz=1G", "1G", {"1G": (0, 3)}),
        # A node without memory has none of its pages, and the others theirs.
        ("hugepagesz=1G hugepages=0:4,2:2", None, {"1G": (4, 0)}),
        ("hugepagesz=1G hugepages=0:4,1024:2", None, {}),
        ("hugepagesz=1G hugepages=0:4,8", None, {}),
        ("hugepagesz=1G hugepages=x hugepages=3", None, {"1G": (2, 1)}),
        ("hugepagesz=1G hugepages= hugepages=3", None, {}),
        ("hugepagesz=1G hugepages=-1", None, {}),
        ("hugepagesz=0x40000000 hugepages=3x", None, {"1G": (2, 1)}),
        ("hugepagesz=1024m hugepages=1", None, {"1G": (1, 0)}),
        ("hugepagesz hugepages", None, {}),
    ],
)
def test_hugepages(text: str, default: str | None, pages: dict[str, tuple[int, int]]) -> None:
    found = parse_command_line(text).hugepages(HOST)
    assert (page_name(found.default_kb) if found.default_kb else None) == default
    assert {page_name(size): (n.get(0, 0), n.get(1, 0)) for size, n in found.pages.items()} == pages


def test_hugepages_of_a_kernel_that_does_not_count_by_node() -> None:
    old = Machine(8, HOST.cpus, HOST.sizes_kb, HOST.nodes, node_limit=0)
    assert parse_command_line("hugepages=0:4,1:4").hugepages(old).pages == {}
    assert parse_command_line("hugepages=6:4").hugepages(old).pages == {MB_2: {0: 3, 1: 3}}
    sparse = Machine(8, HOST.cpus, HOST.sizes_kb, (0, 8), node_limit=2)  # Linux 5.16 to 5.18
    assert parse_command_line("hugepages=0:4,8:4").hugepages(sparse).pages == {}


@pytest.mark.parametrize(
    ("sizes", "default"),
    [
        ((MB_2, GB_1), MB_2),
        ((64, MB_2, 32768, GB_1), MB_2),
        ((MB_2, 32768, GB_1), 32768),
        ((MB_2, 524288, 16777216), 524288),
    ],
)
def test_the_default_size_without_an_argument(sizes: tuple[int, ...], default: int) -> None:
    machine = Machine(8, HOST.cpus, sizes, (0,))
    assert parse_command_line("hugepages=2").hugepages(machine).pages == {default: {0: 2}}


_COUNTS = st.dictionaries(st.sampled_from(HOST.nodes), st.integers(1, 999), min_size=1)


@given(
    st.dictionaries(st.sampled_from([MB_2, GB_1]), _COUNTS),
    st.sampled_from([None, MB_2, GB_1]),
    st.booleans(),
)
def test_pages_that_are_written_are_read(
    pages: dict[int, dict[int, int]], default: int | None, first: bool
) -> None:
    words = [
        f"hugepagesz={page_name(size)} hugepages={','.join(f'{node}:{n}' for node, n in counts.items())}"
        for size, counts in pages.items()
    ]
    if default:
        words.insert(0 if first else len(words), f"default_hugepagesz={page_name(default)}")
    found = parse_command_line(" ".join(words)).hugepages(HOST)
    assert (found.pages, found.default_kb) == (pages, default)


@given(st.integers(1, 1 << 30))
def test_a_size_that_is_written_is_read(size: int) -> None:
    assert memory_kb(page_name(size)) == size


@pytest.mark.parametrize("text", ["", "x", "08", "1", "1023", "G"])
def test_what_is_no_size_in_kb(text: str) -> None:
    assert not memory_kb(text)


# -- What is taken out of a boot loader's files. --------------------------------------------------


DESIRED = {"isolcpus": "2-3", "nohz_full": "2-3", "hugepages": "4", "iommu": "pt", "mce": "ignore_ce"}


def cleaned(task: str, text: str) -> str:
    """Text without what the task of this name takes out, by Jinja2 and ``re`` as Ansible does it."""
    steps = (
        Step(Group.OVS, KernelArgument(*each[:1]), None, each[1], Effect.REBOOT, "", "")
        for each in DESIRED.items()
    )
    tasks = {found["name"]: found for found in kernel_tasks(tuple(steps))}
    named = tasks["Name the kernel's arguments, and in any spelling what they replace"][
        "ansible.builtin.set_fact"
    ]
    variables = tasks[task]["vars"]
    env = jinja2.Environment()
    pattern = env.from_string(variables["netplugin_outdated"]).render(
        **named, netplugin_quote=variables["netplugin_quote"]
    )
    return re.sub(pattern, "", text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('ro "isolcpus=4 5" nohz-full="4" quiet', "ro quiet"),
        ("isolcpus=4 isolcpus=5 isolcpus=", ""),
        ("ro iommu.passthrough=0 iommu.strict=1", "ro iommu.strict=1"),
        ("ro iommu=pt iommu=pt,force iommu=soft,off,force xiommu=off", "ro iommu=pt,force xiommu=off"),
        ('ro mce="off" "mce=ignore_ce" mce=no_cmci mce', "ro mce=no_cmci mce"),
        ("ro xhugepages=4 hugepagesz=2M a.hugepages=4", "ro xhugepages=4 hugepagesz=2M a.hugepages=4"),
    ],
)
def test_a_line_without_older_values(text: str, left: str) -> None:
    assert cleaned("Set the kernel's arguments in entries", text) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('A="ro isolcpus=4 nohz-full=\\"4 5\\" quiet"', 'A="ro quiet"'),
        ('A="isolcpus=4"', 'A=""'),
        ("A='ro isolcpus=\"4\" quiet mce=off'", "A='ro quiet'"),
        ("A=isolcpus=4", "A="),
        ('A="ro \\"isolcpus=4 5\\" iommu=\\"off\\""', 'A="ro"'),
        ('A="ro isolcpus=" # and "isolation"', 'A="ro" # and "isolation"'),
        ('A="ro iommu=pt"\nB="mce=ignore_ce"\n', 'A="ro"\nB=""\n'),
    ],
)
def test_a_script_without_older_values(text: str, left: str) -> None:
    assert cleaned("Take older values out of grub's own files", text) == left


_NAME = st.sampled_from(sorted(DESIRED)).flatmap(lambda name: st.sampled_from([name, name.replace("_", "-")]))
_WORD = st.one_of(
    st.builds("{}={}".format, _NAME, st.text("0123456789-,", max_size=5)),
    st.builds('{}="{}"'.format, _NAME, st.text("0123 -,", max_size=5)),
    st.builds('"{}={}"'.format, _NAME, st.text("0123 -,", max_size=5)),
    st.sampled_from(["ro", "quiet", "root=/dev/sda1", 'dyndbg="file a +p"', "isolcpus.x=1"]),
)


@given(st.lists(_WORD, max_size=9))
def test_a_cleaned_line_has_all_other_words_and_no_older_value(words: list[str]) -> None:
    before = parse_command_line(" ".join(words))
    after = parse_command_line(cleaned("Set the kernel's arguments in entries", " ".join(words)))
    ours = {name for name in DESIRED if not RULES[name].adds}
    expected = [each for each in before.arguments if each[0].replace("-", "_") not in ours]
    assert list(after.arguments) == expected
