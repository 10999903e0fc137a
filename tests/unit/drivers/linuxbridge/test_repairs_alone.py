"""What keeps a VM's frames in is repaired whatever else the kernel refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivers.linuxbridge import filters
from drivers.linuxbridge.commands import BridgeChange
from netplugin.api.errors import HostError
from netplugin.backend import Change, Intent
from netplugin.host.link_values import Bridge, PortOptions, TapUse
from netplugin.host.names import BRIDGE, TAP, device_name
from netplugin.host.tc import Queueing, Tbf
from tests.lab.loop import converge_alone
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import OTHERS, converge, make_spec, planned

TAPS = [device_name(TAP, each) for each in ("p", "q")]
BR = device_name(BRIDGE, "net2")
DESIRED = [
    Intent(each, make_spec(network="net2", mac=f"52:54:00:00:00:0{n}", qos={"ingress_kbps": 1000}))
    for n, each in enumerate(("p", "q"))
]


def damaged() -> Model:
    """Everything that a port and its bridge have is otherwise, and a tap is off its bridge."""
    model = Model()
    converge(model, DESIRED)
    links = model.links.links
    links[BR] = replace(links[BR], mtu=1000, address=None, data=Bridge(stp_state=1, ageing_time=0))
    for name in TAPS:
        model.tc.found[links[name].index] = Queueing(root=Tbf.of(77, 1518))
        port = PortOptions(True, None, OTHERS)
        links[name] = replace(links[name], mtu=1000, address="52:54:00:00:00:99", port=port, use=TapUse())
    links[TAPS[1]] = replace(links[TAPS[1]], master=None)
    links["eth2"] = replace(links["eth2"], master=None)
    model.nft.rules[TAPS[0]].clear()
    del model.nft.maps[filters.PORTS][TAPS[1]]
    return model


CLOSING = {type(change).__name__ for change in planned(damaged(), DESIRED) if change.closes}
OTHER = sorted({type(change).__name__ for change in planned(damaged(), DESIRED)} - CLOSING)


def test_what_keeps_frames_in_is_first() -> None:
    closes = [change.closes for change in planned(damaged(), DESIRED)]
    assert closes == sorted(closes, reverse=True) and set(closes) == {True, False}
    kinds = [type(change).__name__ for change in planned(damaged(), DESIRED)]
    assert kinds[:4] == ["SetGuard", "SetGuard", "SetFilter", "SetFilter"]


@pytest.mark.parametrize(
    "refused", [*OTHER, "SetBridge", "ResetPort", "SetMacs", "SetAddress", "SetTapAddress"]
)
def test_a_refused_change_keeps_no_other_from_the_host(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = damaged()

    def refuse(change: BridgeChange, *_: object) -> None:
        raise HostError("the kernel refuses it", step="test")

    kind = next(type(change) for change in planned(model, DESIRED) if type(change).__name__ == refused)
    monkeypatch.setattr(kind, "apply", refuse)
    result = converge_alone(model.driver, DESIRED)
    assert result.failed.keys() <= {"p", "q"} and (result.failed or result.of_networks)
    left = {type(change).__name__ for change in planned(model, DESIRED)}
    kinds = {each.__name__ for each in (kind, *kind.__subclasses__())}
    of_tap = {"SetMacs"} if refused == "SetTap" else set()  # a tap off its bridge has no MACs there
    assert left <= kinds | of_tap


def test_a_tap_is_not_opened_without_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    model = damaged()

    def refuse(change: Change, *_: object) -> None:
        raise HostError("the kernel refuses it", step="test")

    kind = next(type(change) for change in planned(model, DESIRED) if type(change).__name__ == "SetGuard")
    monkeypatch.setattr(kind, "apply", refuse)
    converge_alone(model.driver, DESIRED)
    assert model.links.links[TAPS[1]].master is None, "it is as the operator left it: off the bridge"
