"""What does not fit between a port where its VM runs and the port that this host would have (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.errors import NetpluginError
from netplugin.api.migration_models import MigrateCheck
from netplugin.api.models import BackendInfo, Finding

#: Fields of a spec that the guest's device has, or that are the VM itself: the same on both hosts.
_SAME = ("vm_id", "mac", "backend", "queues", "rx_queue_size", "tx_queue_size")
#: Facts of a backend that change which features a virtio device offers; QEMU refuses another set.
_OFFERED = ("userspace_tso",)
_VHOST_USER = "vhost_postcopy"


def compared(
    wanted: MigrateCheck,
    here: BackendInfo | None,
    refused: str | None,
    *,
    moves: BackendInfo | None = None,
    unplaced: NetpluginError | None = None,
) -> list[Finding]:
    """The findings, ``ok`` ones included. ``here``: the backend on this host; None: it is not enabled.

    ``refused`` is why this host would refuse the port. ``moves``: the backend of the NIC that the VM
    migrates with, if that is the standby of a VF. ``unplaced`` is why this host cannot place the VM.
    """
    found = [*_backend(wanted, here, refused), *_steps(moves or here), *_spec(wanted)]
    if wanted.domain is not None:
        found.append(_placement(unplaced))
    if here is not None:
        found += [*_features(wanted, here), *_postcopy(wanted, here)]
    return found


def _finding(name: str, fits: bool, found: str, expected: str, fix: str) -> Finding:
    status = "ok" if fits else "fail"
    return Finding.model_validate(
        {"id": f"migrate-{name}", "status": status, "found": found, "expected": expected}
        | ({} if fits else {"fix": fix})
    )


def _backend(wanted: MigrateCheck, here: BackendInfo | None, refused: str | None) -> Iterator[Finding]:
    name = wanted.port.backend
    usable = here is not None and here.usable
    why = here.reason if here is not None else "it is not in [agent] enabled_backends"
    yield _finding(
        "backend",
        usable,
        f"backend {name} is {'usable' if usable else f'not usable here: {why}'}",
        f"backend {name} is usable on the destination",
        (here and here.fix) or "enable it on the destination",
    )
    yield _finding(
        "port",
        refused is None,
        refused or "the destination takes the port",
        "the destination takes the port",
        "see what was found",
    )


def _steps(here: BackendInfo | None) -> Iterator[Finding]:
    moves = here is not None and here.features.live_migration
    name = f"backend {here.name}" if here is not None else "a backend that is not enabled"
    if here is not None and not moves and "mode" in here.facts:
        name += f" in {here.facts['mode']} mode"
    yield _finding(
        "steps",
        moves,
        f"{name} {'migrates' if moves else 'does not migrate'} ports",
        "features.live_migration is true",
        "plug the port by PUT on the destination, and DELETE it on the source; or ask for a VF with "
        "vf.teaming",
    )


def _placement(unplaced: NetpluginError | None) -> Finding:
    return _finding(
        "placement",
        unplaced is None,
        unplaced.detail if unplaced else "this host has what the VM's policy asks for",
        "the VM can be placed on the destination",
        (unplaced and unplaced.fix) or "see what was found",
    )


def _spec(wanted: MigrateCheck) -> Iterator[Finding]:
    here, there = wanted.port, wanted.source
    differing = [name for name in _SAME if getattr(here, name) != getattr(there, name)]
    differing += ["network.mtu"] if here.network.mtu != there.network.mtu else []
    yield _finding(
        "device",
        not differing,
        f"{', '.join(differing)} differ" if differing else "the guest's device is the same on both hosts",
        "the same VM, MAC, backend, MTU, queues and rings on both hosts",
        "prepare the port with the values of the source",
    )


def _features(wanted: MigrateCheck, here: BackendInfo) -> Iterator[Finding]:
    for name in _OFFERED:
        if name in here.facts and name in wanted.source_facts:
            one, other = here.facts[name], wanted.source_facts[name]
            yield _finding(
                name.replace("_", "-"),
                one == other,
                f"{name} is {one} here and {other} on the source",
                f"{name} is the same on both hosts, as it decides what a virtio device offers",
                "set it alike on both hosts, and restart OVS there",
            )


def _postcopy(wanted: MigrateCheck, here: BackendInfo) -> Iterator[Finding]:
    facts = {"the destination": here.facts, "the source": wanted.source_facts}
    without = [host for host, each in facts.items() if each.get(_VHOST_USER) is False]
    if wanted.postcopy and _VHOST_USER in here.facts:
        yield _finding(
            "postcopy",
            not without,
            f"OVS on {' and '.join(without)} has it off" if without else "OVS has it on",
            "other_config:vhost-postcopy-support=true, as postcopy with vhost-user needs",
            "ovs-vsctl set Open_vSwitch . other_config:vhost-postcopy-support=true, and restart "
            "ovs-vswitchd; or migrate by precopy",
        )
