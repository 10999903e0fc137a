"""A guest under traffic migrates between two hypervisors: what is lost each way, and whether TCP goes on.

A daemon, or QEMU, is killed on either side meanwhile, or the destination refuses the guest. After what a
platform does then, the guest is reached on exactly one side, and nothing is left on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import libvirt  # type: ignore[import-untyped]
import pytest

from tests.bench.live_migration import BACKENDS, booted, moved_under_traffic, row
from tests.functional.docs.migration import carry_out
from tests.lab.hypervisor import BRIDGE_BACKEND, OVS_BACKEND
from tests.lab.mishaps import Mishap, Moment, Victim, assert_one_side, befall, mishaps, moving, recover
from tests.lab.traveller import Traveller, Way
from tests.lab.two_hosts import two_hosts

#: What may be lost beyond the downtime: what was on its way.
ON_THE_WAY = 10
RUNS = 5
#: Those of `make test`.
SAMPLE = ((OVS_BACKEND, Way.AUTO, Mishap(Moment.MOVING, Victim.AGENT, True)),)


def _backends(*quick: str) -> list[object]:
    marks = {backend: [] if backend in quick else [pytest.mark.long] for backend in BACKENDS}
    return [pytest.param(backend, marks=marks[backend], id=backend) for backend in BACKENDS]


@pytest.fixture(scope="module")
def travellers() -> Iterator[dict[str, Traveller]]:
    """A VM on each backend of the first of two hypervisors."""
    with two_hosts(BACKENDS) as hosts:
        yield booted(hosts)


@pytest.fixture
def traveller(request: pytest.FixtureRequest, travellers: dict[str, Traveller]) -> Traveller:
    return travellers[request.param]


@pytest.mark.parametrize("traveller", BACKENDS, indirect=True)
def test_the_agents_follow_a_guest_under_traffic(
    traveller: Traveller, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = moved_under_traffic(traveller, Way.AUTO)
    with capsys.disabled():
        print(f"\n  {row([traveller.nic.backend, *figures.cells()])}", end="")
    assert figures.stream_survived
    assert figures.lost_from_guest == 0
    assert_one_side(traveller)


@pytest.mark.parametrize("traveller", _backends(BRIDGE_BACKEND), indirect=True)
def test_the_example_of_the_page_migrates_it(traveller: Traveller, short_path: Path) -> None:
    with traveller.traffic(short_path) as peer:
        carry_out(traveller, short_path)
        traveller.has_moved()
        peer.wait_received()
    assert_one_side(traveller)


@pytest.mark.long
@pytest.mark.parametrize("traveller", BACKENDS, indirect=True)
def test_a_guest_loses_no_more_than_the_downtime(traveller: Traveller) -> None:
    """The least of some runs: on a machine with other work a daemon may wait for a CPU in any of them."""
    found = [moved_under_traffic(traveller, Way.AUTO) for _ in range(RUNS)]
    assert all(figures.stream_survived for figures in found)
    assert min(figures.lost_beyond_downtime for figures in found) <= ON_THE_WAY, found


@pytest.mark.long
@pytest.mark.parametrize("traveller", BACKENDS, indirect=True)
def test_a_stream_survives_with_hooks_before_and_after_only(traveller: Traveller) -> None:
    assert moved_under_traffic(traveller, Way.MANUAL).stream_survived
    assert_one_side(traveller)


def _kills() -> Iterator[object]:
    for backend, mishap in mishaps(BACKENDS):
        for way in (Way.MANUAL, Way.AUTO):
            marks = [] if (backend, way, mishap) in SAMPLE else [pytest.mark.long]
            yield pytest.param(backend, way, mishap, marks=marks, id=f"{backend}-{way.value}-{mishap}")


@pytest.mark.parametrize(("traveller", "way", "mishap"), list(_kills()), indirect=["traveller"])
def test_a_kill_leaves_the_guest_on_one_side(
    traveller: Traveller, way: Way, mishap: Mishap, tmp_path: Path
) -> None:
    try:
        befall(traveller, way, mishap, tmp_path)
    except BaseException:
        traveller.renew()  # the next case has a VM in any case
        raise


@pytest.mark.parametrize("traveller", _backends(BRIDGE_BACKEND), indirect=True)
def test_a_migration_that_is_aborted_half_way_leaves_nothing(traveller: Traveller, tmp_path: Path) -> None:
    with traveller.traffic(tmp_path) as peer:
        traveller.prepare(Way.AUTO)
        with moving(traveller):
            traveller.domain(traveller.home).abortJob()
        assert recover(traveller, Way.AUTO)
        assert_one_side(traveller)
        peer.wait_received()


@pytest.mark.long
@pytest.mark.parametrize("way", [Way.MANUAL, Way.AUTO])
@pytest.mark.parametrize("traveller", BACKENDS, indirect=True)
def test_a_destination_that_refuses_the_guest_is_left_as_it_was(
    traveller: Traveller, way: Way, tmp_path: Path
) -> None:
    with traveller.traffic(tmp_path) as peer:
        traveller.prepare(way)
        with pytest.raises(libvirt.libvirtError):
            traveller.start_migration(xml=traveller.destination_xml().replace("virtio", "e1000"))
        assert recover(traveller, way)
        assert_one_side(traveller)
        peer.wait_received()


@pytest.mark.parametrize("traveller", BACKENDS, indirect=True)
def test_an_agent_that_refuses_the_port_has_nothing_of_it(traveller: Traveller) -> None:
    network = {**traveller.nic.spec()["network"], "physical_network": "elsewhere"}
    body = {"phase": "prepare", "port": traveller.nic.spec(network=network), "activation": "auto"}
    status, _ = traveller.away.agent.call("POST", f"/v1/ports/{traveller.nic.port_id}:migrate", body)
    assert 400 <= status < 500
    assert_one_side(traveller)
