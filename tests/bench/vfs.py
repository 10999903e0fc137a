"""How fast VFs are found and claimed: a fake /sys of 8 NICs with 128 VFs each, 64 threads at once.

    python -m tests.bench.vfs [--json FILE]

It needs no NIC and no root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agents.store.port_table import Record
from agents.store.store import Store
from drivers.vf.inventory import Inventory, read_inventory
from drivers.vf.ledger import claim_vf
from drivers.vf.options import parse_devices
from netplugin.api.models import PortState
from netplugin.backend import Intent
from netplugin.host.netlink import attribute
from netplugin.host.vf_messages import NicLink, VfAttributes, parse_link
from tests.unit.drivers.sriov.world import World, make_spec
from tests.unit.drivers.vf.test_vf_primitives import link_of, vf_info
from tests.unit.drivers.vf.trees import Nic, build
from tests.unit.kernel_answers import message

NICS, VFS = 8, 128
ROUNDS, THREADS = 20, 64


def median_ms(call: Callable[[], Any]) -> dict[str, float]:
    """By the clock, and of this process alone: the machine may be busy with other work."""
    wall, cpu = [], []
    for _ in range(ROUNDS):
        starts = time.perf_counter(), time.process_time()
        call()
        wall.append((time.perf_counter() - starts[0]) * 1e3)
        cpu.append((time.process_time() - starts[1]) * 1e3)
    return {
        "wall_p50_ms": round(statistics.median(wall), 3),
        "cpu_p50_ms": round(statistics.median(cpu), 3),
    }


def make_nics() -> list[Nic]:
    return [
        Nic(
            address=f"0000:{0x10 * n + 0x10:02x}:00.0",
            interface=f"eth{n}",
            vfs=range(VFS),
            total=VFS,
            numa_node=n % 2,
            vf_bus=f"{0x10 * n + 0x10:02x}",
            mac=f"52:54:00:00:aa:{n:02x}",
        )
        for n in range(NICS)
    ]


def inventory_of(root: Path, nics: Sequence[Nic], links: dict[str, NicLink]) -> Inventory:
    return read_inventory(root, parse_devices(["net1:8086:10c9"]), links)


def contend(store: Store, inventory: Inventory) -> dict[str, float]:
    """Each thread looks, chooses and commits a claim of its own: what one waits for, and holds."""
    together = threading.Barrier(THREADS)
    waited: list[float] = []
    chose: list[float] = []

    def take(number: int) -> str:
        spec = make_spec(number + 1)
        together.wait()
        start = time.perf_counter()
        commit_sequence = store.commit_sequence()
        with store.claiming(commit_sequence) as taken:
            got_it = time.perf_counter()
            claim = claim_vf(inventory, Intent(f"p{number}", spec), taken)
            chose.append((time.perf_counter() - got_it) * 1e3)
            store.save([Record(f"p{number}", spec, state=PortState.PENDING, claims=(claim,))])
        waited.append((time.perf_counter() - start) * 1e3)
        return claim.key

    with ThreadPoolExecutor(THREADS) as threads:
        keys = list(threads.map(take, range(THREADS)))
    assert len(set(keys)) == THREADS
    return {
        "choose_p50_ms": round(statistics.median(chose), 3),
        "wait_choose_commit_p50_ms": round(statistics.median(waited), 3),
        "all_ms": round(max(waited), 3),
    }


def looks_per_plug(directory: Path) -> dict[str, float]:
    """How often a plug lists all interfaces of the kernel, and how often it asks for one NIC's."""
    directory.mkdir()
    world = World(directory)
    model = world.model
    before = model.looks, model.looks_again
    for number in range(7):
        assert world.plug(f"p{number}", make_spec(number + 1)) is None
    world.store.close()
    return {
        "netlink_dumps_per_plug": (model.looks - before[0]) / 7,
        "single_links_read_per_plug": (model.looks_again - before[1]) / 7,
    }


def measure() -> dict[str, Any]:
    nics = make_nics()
    links = {nic.interface: nic.link(index) for index, nic in enumerate(nics, 2)}
    vfs = attribute(22, *(vf_info(n, VfAttributes(spoofchk=True, trusted=False)) for n in range(VFS)))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        root = build(Path(scratch) / "sys", *nics)
        inventory = inventory_of(root, nics, links)
        assert len(inventory.vfs) == NICS * VFS
        store = Store(Path(scratch) / "agent.db")
        figures = {
            "nics": NICS,
            "vfs": NICS * VFS,
            "read_sysfs": median_ms(lambda: inventory_of(root, nics, links)),
            "read_netlink": median_ms(
                lambda: [parse_link(message(16, link_of(7, "eth0", vfs))) for _ in range(NICS)]
            ),
            "claims_of_64_threads": contend(store, inventory),
            **looks_per_plug(Path(scratch) / "world"),
        }
        store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    text = json.dumps(measure(), indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
