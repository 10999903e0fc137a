"""What cyclictest writes, and the percentiles of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.api.errors import BackendUnavailable
from netplugin.tuning.verifying import loop
from netplugin.tuning.verifying.cyclictest import arguments, parse
from netplugin.tuning.verifying.result import (
    PERCENTILES,
    Histogram,
    LatencySettings,
    ThroughputSettings,
    merged,
)
from netplugin.tuning.verifying.shell import require

DATA = Path(__file__).parents[2] / "data" / "cyclictest-2.4"
SETTINGS = LatencySettings(cpus="2-3,8", round_s=600, interval_us=200, priority=95, width_us=2000)


def histogram(samples: list[int], width: int = 10_000) -> Histogram:
    """As cyclictest would count them."""
    within = [value for value in samples if value < width]
    return Histogram(
        counts={value: within.count(value) for value in set(within)},
        overflows=len(samples) - len(within),
        min_us=min(samples),
        average_us=sum(samples) / len(samples),
        max_us=max(samples),
    )


def test_a_real_run() -> None:
    version, found = parse((DATA / "two-cpus.json").read_text())
    assert version == "2.40"
    assert list(found.cpus) == [0, 1]
    first = found.cpus[0]
    assert (first.min_us, first.average_us, first.max_us) == (6, 14.93, 245)
    assert (first.samples, first.overflows) == (9999, 0)
    # By hand: nine samples are above (245 162 149 143 142 136 135 133 133), and one in 1,000 is ten.
    assert first.percentile(PERCENTILES["P99.9"]) == 108
    assert first.percentile(PERCENTILES["P99.99"]) is None
    overall = found.overall
    assert (overall.samples, overall.min_us, overall.max_us) == (19997, 6, 380)
    assert overall.average_us == pytest.approx((14.93 * 9999 + 13.87 * 9998) / 19997)


def test_samples_beyond_the_width_are_counted() -> None:
    """cyclictest says how many on its standard output: 240 and 215."""
    _, found = parse((DATA / "overflows.json").read_text())
    assert [each.overflows for each in found.cpus.values()] == [240, 215]
    assert found.cpus[0].percentile(0.99) == found.cpus[0].max_us == 2349
    assert found.overall.overflows == 455


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"thread": {}}',
        '{"thread": {"0": {"cpu": 0}}}',
        '{"thread": {"0": {"histogram": {}, "cycles": 0, "min": 0, "max": 0, "avg": 0, "cpu": 0}}}',
        '{"thread": {"0": {"histogram": 5, "cycles": 1, "min": 0, "max": 0, "avg": 0, "cpu": 0}}}',
        '{"thread": {"0": {"histogram": {"1": "x"}, "cycles": 1, "min": 0, "max": 0, "avg": 0, "cpu": 0}}}',
    ],
)
def test_what_is_no_result_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_the_words_of_cyclictest() -> None:
    words = arguments(SETTINGS, Path("/x/out.json"), frozenset({0, 1, 2, 3}))
    assert words == [
        "cyclictest",
        "--quiet",
        "--mlockall",
        "--priority=95",
        "--interval=200",
        "--duration=600",
        "--histogram=2000",
        "--affinity=2-3,8",
        "--threads=3",
        "--mainaffinity=0-1",
        "--json=/x/out.json",
    ]
    assert not [w for w in arguments(SETTINGS, Path("/x"), frozenset({2, 3})) if "main" in w]


LATENCIES = st.lists(st.integers(0, 300), min_size=1, max_size=400)
SHARES = st.sampled_from(list(PERCENTILES.values()))


@given(LATENCIES, SHARES)
def test_a_percentile_is_the_least_that_so_many_do_not_exceed(samples: list[int], share: float) -> None:
    found = histogram(samples).percentile(share)
    ordered = sorted(samples)
    rank = next(n for n in range(len(samples) + 1) if n >= len(samples) * share - 1e-6)
    if rank >= len(samples):
        assert found is None
    else:
        assert found == ordered[rank - 1]


@pytest.mark.parametrize(("count", "name"), [(100, "P99"), (1000, "P99.9"), (700, "P99")])
def test_a_share_that_is_a_whole_number_of_samples(count: int, name: str) -> None:
    found = histogram(list(range(count))).percentile(PERCENTILES[name])
    assert found == round(count * PERCENTILES[name]) - 1


@given(LATENCIES, SHARES, st.integers(1, 300))
def test_beyond_the_width_a_percentile_is_the_highest(samples: list[int], share: float, width: int) -> None:
    whole, cut = histogram(samples).percentile(share), histogram(samples, width).percentile(share)
    assert cut == whole or (whole is not None and whole >= width and cut == max(samples))


@given(LATENCIES, st.integers(1, 5))
def test_parts_together_are_the_whole(samples: list[int], parts: int) -> None:
    each = [part for n in range(parts) if (part := samples[n::parts])]
    together, whole = merged(histogram(part, 200) for part in each), histogram(samples, 200)
    assert math.isclose(together.average_us, whole.average_us, abs_tol=1e-9)
    assert together.model_dump(exclude={"average_us"}) == whole.model_dump(exclude={"average_us"})


def test_missing_programs_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for program, package in (("cyclictest", "rt-tests"), ("dpdk-testpmd", "dpdk-dev")):
        with pytest.raises(BackendUnavailable) as refused:
            require([program])
        assert refused.value.fix == f"apt-get install {package}"


@pytest.mark.parametrize(
    ("node", "memory"),
    [
        (None, {"--no-huge", "-m"}),
        (0, {"--in-memory", "--socket-mem=64"}),
        (2, {"--in-memory", "--socket-mem=0,0,64"}),
    ],
)
def test_each_testpmd_has_its_cpu_its_memory_and_its_name(node: int | None, memory: set[str]) -> None:
    settings = ThroughputSettings(host_cpu=4, guest_cpu=6, hugepage_node=node, window_s=2, frame_size=256)
    host = loop.host_arguments(settings, Path("/run/x"), {0, 1, 4})
    guest = loop.guest_arguments(settings, Path("/run/x"), {4, 6})
    assert "0@(0-1),1@4" in host and "0@(4,6),1@6" in guest
    for words in (host, guest):
        assert {*memory, "--no-pci", "--forward-mode=macswap"} <= set(words)
    assert {"--file-prefix=host", "--vdev=net_vhost0,iface=/run/x/loop.sock,queues=1"} <= set(host)
    assert {"--file-prefix=guest", "--txpkts=256", "--cmdline-file=/run/x/start"} <= set(guest)


def test_the_kept_output_is_whole() -> None:
    for name in ("two-cpus", "overflows"):
        assert json.loads((DATA / f"{name}.json").read_text())["return_code"] == 0
