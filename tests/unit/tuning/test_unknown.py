"""What cannot be read is unknown with its reason: facts and findings, and never a traceback."""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from netplugin.api.errors import NetpluginError
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.output.text import as_json, plan_json, plan_text
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root, Unknown
from tests.unit.tuning.golden import facts_of
from tests.unit.tuning.machines import MemoryRoot, Tree, load
from tests.unit.tuning.trees import tree


def test_an_empty_root_is_unknown_and_no_traceback(tmp_path: Path) -> None:
    facts = read_facts(Root(tmp_path))
    assert isinstance(facts.cpus.cores, Unknown) and facts.cpus.cores.missing
    assert facts.cpus.cores.reason == "there is no such file"
    assert {f.id for f in check(Scene(facts))} == {"unknown-fact", "hugepages"}


def test_a_refused_file_is_unknown_with_the_reason() -> None:
    path = "/proc/irq/default_smp_affinity"
    facts = read_facts(MemoryRoot(tree(load("small")), {path: errno.EACCES}))
    assert facts.unknown() == (Unknown(path, "permission denied"),)
    [finding] = [f for f in check(Scene(facts)) if f.id == "unknown-fact"]
    assert (finding.status, finding.found) == ("warn", f"{path}: permission denied")


def test_many_refused_files_are_one_finding() -> None:
    made = tree(load("published"))
    refused = dict.fromkeys((path for path in made.files if "/proc/irq/" in path), errno.EACCES)
    facts = read_facts(MemoryRoot(made, refused))
    assert len(facts.unknown()) == 9  # two of each interrupt, and the default
    [finding] = [f for f in check(Scene(facts)) if f.id == "unknown-fact"]
    assert finding.found.endswith(" and 5 more: permission denied")


def test_a_sibling_that_has_just_gone_off_line_is_none() -> None:
    made = tree(load("amd-4-nodes"))  # where CPU 47 is off line
    made.files["/sys/devices/system/cpu/cpu23/topology/thread_siblings_list"] = "23,47\n"
    assert read_facts(MemoryRoot(made)) == facts_of("amd-4-nodes")


def test_a_contradiction_of_siblings_is_unknown() -> None:
    made = tree(load("published"))
    made.files["/sys/devices/system/cpu/cpu33/topology/thread_siblings_list"] = "2,33\n"
    cores = read_facts(MemoryRoot(made)).cpus.cores
    assert isinstance(cores, Unknown) and "contradicts" in cores.reason


SMALL = tree(load("small"))
PATHS = sorted(SMALL.files)
SOME = settings(max_examples=settings().max_examples // 2)
NONSENSE = st.sampled_from(["", "\x00", "garbage", "-1", "99999999999", "3-1", "[", "(", ":", "0x", "1 2"])


#: Most files say the same when they are garbled in another way: what was done is not done again.
_DONE: set[str] = set()


def everything(facts: Facts) -> None:
    """All that is done with facts; only errors of ours may come of it."""
    json.dumps(as_json(facts))
    if repr(facts) in _DONE:
        return
    _DONE.add(repr(facts))
    plan = None
    with contextlib.suppress(NetpluginError):
        plan = make_plan(facts, HostIntent(pmd_cores=1, realtime=True))
        plan_json(plan)
        plan_text(plan)
        playbook(plan, frozenset())
    check(Scene(facts, plan=plan))


@SOME
@given(st.dictionaries(st.sampled_from(PATHS), NONSENSE | st.text(max_size=20), min_size=1, max_size=8))
def test_garbled_files_give_facts_and_findings_and_no_traceback(files: dict[str, str]) -> None:
    facts = read_facts(MemoryRoot(Tree(SMALL.files | files, SMALL.links)))
    everything(facts)


@SOME
@given(
    st.sets(st.sampled_from(PATHS), min_size=1),
    st.sampled_from([errno.ENOENT, errno.EIO, errno.EACCES]),
)
def test_refused_files_give_facts_and_findings_and_no_traceback(paths: set[str], error: int) -> None:
    facts = read_facts(MemoryRoot(SMALL, dict.fromkeys(paths, error)))
    everything(facts)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_bytes(b"\xff\xfe")
    assert Root(tmp_path).text("/proc/cmdline") == Unknown("/proc/cmdline", "is not text")
