"""Domains with anything in any place: refused as an error of ours, or carried out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from netplugin.api.errors import NetpluginError
from netplugin.libvirt.domain import keep_memory_on, parse_domain, written
from netplugin.tuning.placing.capacity import Held
from netplugin.tuning.placing.checks import check
from netplugin.tuning.placing.checks.case import Case, DomainNic
from netplugin.tuning.placing.host_memory import refuse_without_room
from netplugin.tuning.placing.render import render_placed
from tests.unit.tuning.placing.grounds import TWO_NODES
from tests.unit.tuning.placing.strategies import Vm
from tests.unit.tuning.placing.test_host_memory import TWO

VM = Vm(
    1,
    vcpus=4,
    cells=(2, 2),
    iothreads=2,
    realtime=True,
    extra="<iothreadids><iothread id='2'/></iothreadids><currentMemory>9</currentMemory>",
)
VALUES = st.sampled_from(
    [
        "",
        " ",
        "x",
        "-1",
        "0",
        "1",
        "3",
        "1e3",
        "99999999999",
        "9" * 5000,
        "\u0663",
        "1_0",
        "0-99999999999",
        "5-1",
        "^0",
        "0,,1",
        "auto",
        "none",
        "KiB",
        "0-3",
        "\u00e9",
        "shared",
    ]
)


@given(st.booleans(), st.integers(0, 200), VALUES, st.booleans())
def test_any_value_in_any_place(placed: bool, place: int, value: str, remove: bool) -> None:
    domain = VM.domain
    domain.remove(domain.find("currentMemory"))
    if placed:
        mine = render_placed(domain, VM.bindings, VM.policy, TWO_NODES, Held())
        assert mine.cpus
    places = [(each, name) for each in domain.iter() for name in (*each.attrib, None)]
    element, name = places[place % len(places)]
    if remove and element is not domain:
        element.getparent().remove(element)
    elif name is not None:
        element.set(name, value)
    else:
        element.text = value
    again = parse_domain(written(domain), "t")
    nics = tuple(DomainNic("p1", binding) for binding in VM.bindings)
    for work in (
        lambda: check(Case(again, nics, TWO_NODES)),
        lambda: check(Case(again, nics, None, host=TWO, other_config={})),
        lambda: refuse_without_room(again, TWO, None),
        lambda: keep_memory_on(again, {0}),
        lambda: render_placed(again, VM.bindings, VM.policy, TWO_NODES, Held()),
    ):
        try:
            work()
        except NetpluginError as error:
            assert error.status in (409, 422, 507) or error.code == "unsupported"
            assert len(error.detail) < 1000
