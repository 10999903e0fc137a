"""What the pages say of commands, options, files, errors and the API is what the code has.

The ``run=`` blocks are carried out by tests/functional/docs. Those that say ``not-run=`` and why are
checked here only: that bash can read them, and that the commands of netplugin in them parse.
"""

from __future__ import annotations

import configparser
import errno
import re
import shlex
import subprocess
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import netplugin.api.errors as errors
from agents.api.document import routes
from agents.store.store import Store
from agents.telemetry.counter_text import counter_text
from agents.telemetry.metrics import Metrics
from agents.telemetry.pmd_figures import pmd_figures
from agents.telemetry.port_counters import Known, Snapshot
from agents.telemetry.vf_figures import PortCounters
from drivers.dpdkvhostuser.driver import DpdkVhostUser
from drivers.linuxbridge.driver import LinuxBridge
from drivers.sriov.driver import Sriov
from drivers.vdpa.driver import Vdpa
from netplugin import docgen
from netplugin.api.counter_models import Place, Traffic
from netplugin.api.models import PortState, VfCounters
from netplugin.api.pmd_models import PmdCore, PmdState, RxQueue
from netplugin.api.task_models import TaskState
from netplugin.cli import commands as commands_of_package
from netplugin.cli.main import Netplugin
from netplugin.counters import Source, Track
from netplugin.host.nic_errors import OF_BINDING, OF_VF_NUMBER, Causes
from netplugin.host.nic_models import MODELS, Binding, model_of
from netplugin.pmd.read import PmdCounters, PmdReading
from tests.docs.blocks import (
    PAGES,
    ROOT,
    SESSIONS,
    Block,
    blocks,
    output_matches,
    session,
)
from tests.docs.example_backend import list_opts

BLOCKS = [block for page in PAGES for block in blocks(page)]
BASH = [block for block in BLOCKS if block.language == "bash"]
#: A port and an uplink that have every counter.
COUNTS = Known({"port": Track(Source(dict.fromkeys((*Traffic, *Place), 1)), 0.0)}, "net", (), "vm")
COUNTED = Snapshot("b", 1.0, {"nic1": COUNTS}, {"eth0": COUNTS})
#: A PMD thread that has every figure.
PMD_READING = PmdReading(
    PmdState(
        cpus="1",
        cores=(
            PmdCore(
                cpu=1,
                numa_node=0,
                isolated=False,
                busy_percent=1,
                overhead_percent=1,
                packets=1,
                cycles_per_packet=1,
                processing_cycles_per_packet=1,
                queues=(RxQueue(port="p", queue=0, enabled=True, usage_percent=1),),
            ),
        ),
    ),
    {1: PmdCounters(1, 1, 1)},
)
#: Of a page, which answers one question.
MOST_LINES = 350
#: Groups of the setup.cfg that docs/writing-a-backend.md shows.
PACKAGING = {"metadata", "options", "options.entry_points"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(name: str, *columns: str) -> list[list[str]]:
    """The cells of the table with this head."""
    head = "| " + " | ".join(columns) + " |"
    lines = iter(read(name).splitlines())
    assert head in lines, f"{name} has no table {head}"
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# -- blocks --------------------------------------------------------------------------------------


def test_a_bash_block_is_in_a_session_or_says_why_not() -> None:
    for block in BASH:
        words = set(block.words)
        assert len(words & {"run", "not-run"}) == 1, block.where
        assert all(block.words.values()), block.where
        if "run" in words:
            assert block.page in SESSIONS[block.words["run"]], block.where
    for name, pages in SESSIONS.items():
        used = {block.page for block, _ in session(name)}
        assert used == set(pages), f"a page has no block with run={name}"


def test_a_shown_output_belongs_to_a_block_that_is_run() -> None:
    shown = {block.where for block in BLOCKS if "output" in block.words}
    assert shown == {output.where for name in SESSIONS for _, output in session(name) if output}


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.where)
def test_bash_can_read_it(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_how_output_is_compared() -> None:
    assert output_matches("| a | b |\n", "before\n| a  | b |\nafter")
    assert output_matches("one\n...\nfour\n", "one\ntwo\nthree\nfour\n")
    assert output_matches('{"state":"active",...', '{"state":"active","more":1}')
    assert not output_matches("one\nthree\n", "one\ntwo\nthree\n")
    assert not output_matches("true\n", "false\n")


# -- the command line ----------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of ``netplugin`` in a bash block: where, and its words."""
    for block in BASH:
        for line in block.text.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:/\S+/)?netplugin ([a-z].*)", line.strip())
            if match:
                command = re.split(r"\s(?:2?>>?|\|)", match[1])[0]
                yield block.where, shlex.split(command)


def parser_of(words: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of the command that the words begin with, and the words after it."""
    known = dict(commands_of_package.own())
    for count in (3, 2, 1):
        name = " ".join(words[:count])
        if name in known:
            app = Netplugin()
            try:
                command = known[name].load()(app, None, cmd_name=name)
                return command.get_parser(f"netplugin {name}"), words[count:]
            finally:
                app.close()
    raise AssertionError(f"netplugin {' '.join(words)}: no such command")


@pytest.mark.parametrize(
    ("where", "words"), [(f"{where} {shlex.join(words)}", words) for where, words in commands()]
)
def test_a_command_of_netplugin_parses(where: str, words: list[str]) -> None:
    parser, arguments = parser_of(words)
    parser.parse_args(arguments)


def test_a_command_in_the_text_exists_with_its_options() -> None:
    found = 0
    for page in PAGES:
        for text in quoted(without_blocks(page)):
            if not re.match(r"netplugin [a-z]+", text):
                continue
            words = text.split()[1:]
            parser, arguments = parser_of(words)
            known = {option for action in parser._actions for option in action.option_strings}
            assert {word for word in arguments if word.startswith("--")} <= known, text
            found += 1
    assert found >= 3


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


# -- options, files, links -----------------------------------------------------------------------


def known_options() -> dict[str, set[str]]:
    groups = {**docgen._options(), **dict(list_opts())}
    return {group: {option.dest for option in options} for group, options in groups.items()}


def test_an_option_that_is_named_exists() -> None:
    known = known_options()
    named = {
        (str(page.relative_to(ROOT)), group, option)
        for page in PAGES
        for group, option in re.findall(r"`\[([a-zA-Z]+)\] ([a-z_]+)", page.read_text())
    }
    assert len(named) > 20
    assert [n for n in sorted(named) if n[2] not in known.get(n[1], ())] == []


def test_a_configuration_that_is_shown_has_known_options() -> None:
    known = known_options()
    texts = [(block.where, block.text) for block in BLOCKS if block.language == "ini"]
    for block in BASH:
        documents = re.findall(r"> \S+\.conf <<'END'\n(.*?)^END$", block.text, re.M | re.S)
        texts += [(block.where, document) for document in documents]
    assert len(texts) >= 5
    for where, text in texts:
        parser = configparser.ConfigParser(default_section="none")
        parser.read_string(text)
        for group in set(parser.sections()) - PACKAGING:
            assert set(parser[group]) <= known[group], where


def test_a_link_leads_somewhere() -> None:
    for page in PAGES:
        text = without_blocks(page)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_a_page_that_the_code_names_exists() -> None:
    for top in ("netplugin", "agents", "drivers", "tools", "etc", "tests"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in {".py", ".conf", ".yaml", ".service"}:
                text = path.read_text(encoding="utf-8")
                for name in re.findall(r"\bdocs/[\w/-]+\.md\b", text):
                    assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)}: {name}"


def test_each_page_is_listed() -> None:
    listed = read("docs/README.md")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or re.search(rf"\({re.escape(name)}[#)]", listed), name


def test_no_page_has_more_lines_than_the_limit() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = str(page.relative_to(ROOT / "docs"))
        lines = len(page.read_text(encoding="utf-8").splitlines())
        assert lines <= MOST_LINES, f"{name}: {lines} lines"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_a_file_of_the_tree_that_is_named_exists() -> None:
    tops = "netplugin|agents|drivers|tests|docs|etc"
    for page in PAGES:
        for text in quoted(without_blocks(page)):
            if re.fullmatch(rf"(?:{tops})/[\w./-]*", text):
                assert (ROOT / text).exists(), f"{page.name}: {text}"


def test_what_the_page_on_installing_copies_exists() -> None:
    unit = read("etc/systemd/netplugin-agent.service")
    page = read("docs/operating/install.md")
    for path in ("/opt/netplugin/bin", "/etc/netplugin/netplugin.conf"):
        assert path in unit and path in page
    for name in ("etc/netplugin.conf", "etc/systemd/netplugin-agent.service"):
        assert (ROOT / name).is_file() and name in page


# -- what tables list ----------------------------------------------------------------------------


def test_the_backends_that_work_are_those_that_are_there() -> None:
    rows = table("README.md", "backend", "networks", "NIC of the VM", "filters", "state")
    working = {quoted(row[0])[0]: row for row in rows if row[4] == "works"}
    assert {row[4] for row in rows} == {"works"}
    installed = {e.name for e in entry_points(group="netplugin.backends")}
    drivers: list[Any] = [DpdkVhostUser, LinuxBridge, Sriov, Vdpa]
    assert set(working) == installed == {driver.name for driver in drivers}
    for driver in drivers:
        networks = tuple(working[driver.name][1].lower().split(", "))
        assert networks == driver.features.networks
        filters = tuple(word for word in ("mac", "ip") if word.upper() in working[driver.name][3])
        assert filters == driver.features.port_security


def test_the_queues_of_vfs_are_those_of_the_code() -> None:
    lines = read("docs/nics.md").splitlines()
    head, row = (
        next(line for line in lines if line.startswith(start)).strip("|").split("|")[1:]
        for start in ("| | `igb`", "| `queues`")
    )
    reported = {quoted(name)[0]: cell for name, cell in zip(head, row, strict=True)}
    queues = {name: model.vf.queues for name, model in MODELS.items() if model.vf.queues > 1}
    assert {name: int(cell.split()[0].rstrip(";")) for name, cell in reported.items()} == queues
    sources = table("docs/nics.md", "driver", "the bound is", "in")
    assert [quoted(source[0])[0] for source in sources] == list(queues)


def test_the_nics_for_dpdk_are_those_of_the_code() -> None:
    starts = {Binding.KEPT: "stays", Binding.VFIO: "vfio-pci", Binding.UIO: "uio", Binding.NONE: "none"}
    listed = {
        name: driver
        for names, driver, *_ in table(
            "docs/nics.md", "kernel driver", "driver under DPDK", "VFs", "known to matter"
        )
        for name in quoted(names)
    }
    assert listed.keys() == MODELS.keys()
    for name, driver in listed.items():
        assert driver.startswith(starts[model_of(name).binding]), name


@pytest.mark.parametrize(
    ("causes", "after"), [(OF_VF_NUMBER, "refuses a number"), (OF_BINDING, "refuses another")]
)
def test_the_errors_of_the_kernel_are_those_of_the_code(causes: Causes, after: str) -> None:
    page = read("docs/nics.md").partition(after)[2].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:]]
    listed = {getattr(errno, code): (cause, fix) for codes, cause, fix in rows for code in codes.split(", ")}
    assert listed == dict(causes)


def test_the_api_is_all_there_is() -> None:
    paths = routes().openapi()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    listed = set()
    for row in table("docs/reference-api.md", "method and path", "meaning"):
        method = "GET"
        for text in quoted(row[0]):
            *named, path = text.split()
            method = named[0] if named else method
            listed.add((method, path))
    assert listed - {("GET", "/openapi.json")} == served


def test_the_errors_and_steps_are_those_of_the_code() -> None:
    sources = "".join(
        path.read_text()
        for part in ("netplugin", "agents", "drivers")
        for path in (ROOT / part).rglob("*.py")
    )
    codes = {error.code for error in errors.ALL}
    for code, steps, *_ in table("docs/operating/status.md", "code", "step", "what it is", "what to do"):
        assert set(quoted(code)) <= codes
        for step in quoted(steps):
            assert f'"{step}"' in sources, step


def test_the_states_are_all_there() -> None:
    for name, columns in (
        ("docs/architecture.md", ("state", "meaning", "comes next")),
        ("docs/operating/status.md", ("state", "what it means", "what to do")),
    ):
        listed = [quoted(row[0])[0] for row in table(name, *columns)]
        assert sorted(listed) == sorted(PortState)
    page = read("docs/operating/async.md")
    assert all(f"`{state}`" in page for state in TaskState)


def test_the_metrics_are_all_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    metrics = Metrics(store)
    metrics.served("b", "put", {"total": 1.0}, None)
    metrics.changed("b", "c", "plug")
    watched: dict[str, Callable[[], Any]] = {
        "watch_failures": lambda: {"loop": 1},
        "watch_pmd": lambda: None,  # docs/pmd.md has these
        "watch_vfs": lambda: [PortCounters("nic1", "0000:03:10.1", VfCounters())],
        "watch_counters": lambda: counter_text([COUNTED]),
        "watch_credentials": lambda: False,
    }
    metrics.watch_fleet(lambda: True, lambda: {"owned": 1})
    known = {*watched, "watch_fleet"}
    assert {name for name in vars(Metrics) if name.startswith("watch_")} == known
    for name, read in watched.items():
        getattr(metrics, name)(read)
    text = metrics.render().decode()
    store.close()
    made = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    made = {name for name in made if not name.endswith("_created")}
    rows = table("docs/operating/monitoring.md", "metric", "labels", "meaning")
    assert {quoted(row[0])[0] for row in rows} == made
    for row in rows:
        shown = re.search(rf"^{quoted(row[0])[0]}\w*{{(.*?)}}", text, re.MULTILINE)
        labels = re.findall(r"(\w+)=", shown[1]) if shown else quoted(row[1])
        assert set(labels) - {"le"} == set(quoted(row[1])), row


def test_every_place_of_drops_is_explained() -> None:
    rows = table(
        "docs/operating/monitoring.md",
        *("place", "what was dropped", "`dpdkvhostuser`, `vdpa`", "`linuxbridge`", "`sriov`"),
    )
    assert [name for row in rows for name in quoted(row[0])] == [place.value for place in Place]
    assert all(any(row[2:]) for row in rows), "each has a source"


def test_the_metrics_of_pmd_threads_are_all_there() -> None:
    made = {}
    for family in pmd_figures(lambda: PMD_READING):
        total = "_total" if family.type == "counter" else ""
        [labels] = {tuple(sample.labels) for sample in family.samples}
        made[family.name + total] = set(labels)
    rows = table("docs/pmd.md", "metric", "labels", "meaning")
    assert {quoted(name)[0]: set(quoted(labels)) for name, labels, _ in rows} == made


def test_the_libraries_are_those_of_setup_cfg_with_their_bounds() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    desired = {
        match[1].lower(): match[2].replace(",", ", ")
        for line in parser["options"]["install_requires"].split()
        if (match := re.fullmatch(r"([\w.-]+?)((?:[<>=].*)?)", line))
    }
    listed: dict[str, str] = {}
    for row in table("docs/libraries.md", "library", "bounds", "what for", "why this one"):
        names = re.findall(r"\[([\w.-]+)\]\(", row[0])
        listed |= dict(zip(names, row[1].split("; "), strict=True))
    assert {name.lower(): bounds for name, bounds in listed.items()} == desired


def test_the_changelog_has_this_version() -> None:
    version = re.search(r"^version = (.+)$", read("setup.cfg"), re.MULTILINE)
    assert version and f"## [{version[1]}]" in read("CHANGELOG.md")


def test_the_licence_is_whole() -> None:
    text = read("LICENSE")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
