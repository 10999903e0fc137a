"""What tcpreplay says of a run (recorded with 4.4.3), and what is refused before anything is sent."""

from __future__ import annotations

import socket
import struct
from contextlib import closing
from pathlib import Path

import pytest
from netplugin_zeroloss.generators import wire
from netplugin_zeroloss.generators.choose import Tcpreplay, make
from netplugin_zeroloss.generators.tcpreplay import Played
from netplugin_zeroloss.values import GeneratorError, UnusableInput

PATHS = ({"send": "nosuch0", "receive": "nosuch1"},)
DATA = Path(__file__).resolve().parents[2] / "data" / "tcpreplay-4.4.3"


def played(name: str) -> Played:
    return Played.parse((DATA / f"{name}.txt").read_text())


def test_a_short_run() -> None:
    run = played("short")
    assert (run.sent, run.failed, run.retried) == (40_000, 0, 0)
    assert run.elapsed_s == pytest.approx(0.400144, abs=1e-6) and run.uncertainty_s <= 1e-6


def test_a_long_run_is_timed_by_its_rate() -> None:
    """The seconds say 2.00, and the rate knows more: 40,000 frames at 20,000.25 a second."""
    run = played("long")
    assert run.sent == 40_000
    assert run.elapsed_s == pytest.approx(40_000 / 20_000.25, abs=2e-4)
    assert run.uncertainty_s < 2e-6


def test_a_slow_run_is_timed_by_its_seconds() -> None:
    """Three frames at two a second: the rate has three digits."""
    run = played("slow")
    assert run.sent == 3 and run.elapsed_s == pytest.approx(1.0, abs=run.uncertainty_s)


def test_an_interrupted_run_counts_what_it_sent() -> None:
    """``Actual`` has the frame that was not sent any more."""
    assert played("interrupted").sent == 18_506


def test_a_run_of_one_frame() -> None:
    run = played("one")
    assert run.sent == 1 and run.elapsed_s <= 1e-6


def test_retries_and_failures_are_counted() -> None:
    text = (DATA / "short.txt").read_text()
    text = text.replace("(ENOBUFS): 0", "(ENOBUFS): 12").replace("(EAGAIN):  0", "(EAGAIN):  3")
    run = Played.parse(text.replace("Failed packets:            0", "Failed packets:            4"))
    assert (run.failed, run.retried) == (4, 15)


def test_a_run_that_says_nothing() -> None:
    with pytest.raises(GeneratorError, match="did not say"):
        Played.parse("Killed")


@pytest.mark.parametrize("outgoing", [True, False])
def test_the_filter_takes_frames_with_the_marker_in_one_direction(outgoing: bool) -> None:
    program = wire._filter(b"\x01\x02\x03\x04\x05\x06\x07\x08", outgoing).code
    high, low = b"\x01\x02\x03\x04", b"\x05\x06\x07\x08"
    ours = bytes(42) + high + low + bytes(10)
    assert _accepts(program, ours, outgoing)
    assert not _accepts(program, ours, not outgoing)
    assert not _accepts(program, bytes(42) + high + bytes(14), outgoing)
    assert not _accepts(program, bytes(46) + low + bytes(10), outgoing)


def _accepts(program: bytes, frame: bytes, outgoing: bool) -> bool:
    """What the kernel does with such a program."""
    instructions = list(struct.iter_unpack("HBBI", program))
    place, accumulator = 0, 0
    while True:
        code, yes, no, value = instructions[place]
        place += 1
        if code == 0x20:
            special = value == (0xFFFFF000 + 4)
            accumulator = (4 if outgoing else 0) if special else struct.unpack_from(">I", frame, value)[0]
        elif code == 0x15:
            place += yes if accumulator == value else no
        elif code == 0x05:
            place += value
        else:
            assert code == 0x06
            return bool(value)


def test_without_tcpreplay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(UnusableInput, match="apt-get install tcpreplay"):
        make(Tcpreplay(paths=PATHS))


def test_without_such_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(UnusableInput, match="nosuch0: No such device"):
        make(Tcpreplay(paths=PATHS))
    with pytest.raises(UnusableInput, match="/run/netns/nosuch: No such file"):
        make(Tcpreplay(paths=PATHS, netns="nosuch"))


def test_an_interface_is_what_the_kernel_says() -> None:
    with closing(wire.Wire()) as here:
        looked = here.interface("lo")
        assert (looked.name, looked.address) == ("lo", "00:00:00:00:00:00") and looked.mtu >= 1500
        assert looked.index == socket.if_nametoindex("lo") and here.dropped(looked) >= 0


def test_an_interface_is_that_of_one_run() -> None:
    """Two would add their frames up, and find half of what the device can do; and both end."""
    with closing(wire.Wire()) as first:
        first.take(first.interface("lo"))
        with closing(wire.Wire()) as second, pytest.raises(UnusableInput, match="lo is that of another run"):
            second.take(second.interface("lo"))
    with closing(wire.Wire()) as third:
        third.take(third.interface("lo"))
