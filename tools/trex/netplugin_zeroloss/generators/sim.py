"""The generator ``sim``: simulated devices, and simulated generator faults."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Literal

from netplugin_zeroloss.generators.contract import Generator, GeneratorDescription, GeneratorInfo, Positive
from netplugin_zeroloss.generators.devices import DEVICES, DeviceSpec, Passage, SimulatedDevice
from netplugin_zeroloss.values import (
    Direction,
    LatencySummary,
    Measurement,
    Progress,
    TrialRequest,
    UnusableInput,
)


class Sim(GeneratorDescription):
    """A simulated device (``FAMILIES``), in virtual time."""

    type: Literal["sim"] = "sim"
    device: str = "clean"
    seed: int | str = 1
    #: In pps, all directions together; None: the capacity of the device.
    capacity_pps: Positive | None = None


#: A generator fault: modifies the measurement of a trial.
Fault = Callable[[Measurement, TrialRequest, random.Random], Measurement]

#: Latency of an idle simulated device in microseconds, samples per second, and load beyond which a queue
#: would grow without end.
_BASE_LATENCY_US = 20.0
_LATENCY_SAMPLES_PPS = 1000
_MOST_LOAD = 0.99
#: Limit of the simulated generators that have one.
_GENERATOR_LIMIT_PPS = 3e6


@dataclass(frozen=True, slots=True)
class SimFamily:
    """A simulated device per direction, the generator, and the correct verdict."""

    name: str
    devices: tuple[DeviceSpec, ...]
    verdict: str = "ndr"
    #: Maximum rate of the generator.
    sends_pps: float = math.inf
    #: Send the excess later, as TRex does, instead of leaving it out.
    stretches: bool = False
    fault: Fault | None = None

    def limit_pps(self, duration_s: float) -> float | None:
        """Return the known answer: that of the worst direction, summed over all directions; None if none."""
        limits = [device.limit_pps(duration_s) or 0.0 for device in self.devices]
        return (len(limits) * min(limits) or None) if self.verdict == "ndr" else None

    def loss_probability(self, rate_pps: float, duration_s: float) -> float:
        """Return the probability of loss at this load within ``duration_s``."""
        share = rate_pps / len(self.devices)
        return 1 - math.prod(1 - d.loss_probability(share, duration_s) for d in self.devices)


class SimGenerator(Generator):
    """Runs trials in virtual time: a minute of traffic takes about a millisecond."""

    def __init__(self, family: SimFamily, rng: random.Random, can_abort: bool = True) -> None:
        self._family = family
        self._rng = rng
        self._devices = [SimulatedDevice(spec, rng) for spec in family.devices]
        able = dict.fromkeys(("virtual_time", "latency", "bursts", "bursts_of_mixes"), True)
        self._info = GeneratorInfo(f"sim:{family.name}", can_abort=can_abort, **able)

    def run(self, request: TrialRequest) -> Measurement:
        family, duration = self._family, request.duration_s
        rate = min(request.rate_pps, family.sends_pps)
        if family.stretches:
            duration *= request.rate_pps / rate
        abort = request.abort_on_loss and self._info.can_abort
        share, parts = rate / len(self._devices), request.readings or 1
        passed = [self._through(share, duration / parts, abort, request.burst) for _ in range(parts)]
        measured = _measured(passed, over_time=bool(request.readings))
        if request.latency:
            latencies = tuple(_latency(device.spec, share, duration) for device in self._devices)
            measured = replace(measured, latencies=latencies)
        if not measured.aborted and not family.stretches and rate < request.rate_pps:
            short = round(request.packets) - measured.tx_packets
            measured = replace(measured, tx_shortfall=max(0, short))
        return measured if family.fault is None else family.fault(measured, request, self._rng)

    def recall(self, request: TrialRequest) -> None:
        """Run the trial again, so that clock and random generator continue as without a restart."""
        self.run(request)

    def _through(self, rate: float, duration: float, abort: bool, burst: int) -> list[Passage]:
        """Run all directions; the first to stop stops the others."""
        if len(self._devices) == 1 or not abort:
            return [device.run(rate, duration, abort, burst) for device in self._devices]
        ahead = [device.run(rate, duration, True, burst) for device in copy.deepcopy(self._devices)]
        end = min(passage.elapsed_s for passage in ahead)
        passages = [device.run(rate, end, False, burst) for device in self._devices]
        for passage in passages:
            passage.aborted = end < duration
        return passages


def _measured(parts: Sequence[Sequence[Passage]], over_time: bool) -> Measurement:
    """Return one trial of all directions, in parts that followed each other (``over_time``)."""
    seconds = accumulate(max(passage.elapsed_s for passage in part) for part in parts)
    sent = accumulate(sum(passage.sent for passage in part) for part in parts)
    received = accumulate(sum(passage.received for passage in part) for part in parts)
    progress = tuple(map(Progress, seconds, sent, received))
    places: Counter[str] = Counter()
    for passage in chain.from_iterable(parts):
        places.update(passage.places)
    ways = [Direction.total([Direction(p.sent, p.received) for p in way]) for way in zip(*parts, strict=True)]
    end = progress[-1]
    return Measurement(
        *(end.tx_packets, end.rx_packets, end.elapsed_s),
        aborted=not over_time and any(passage.aborted for passage in parts[0]),
        directions=tuple(ways) if len(ways) > 1 else (),
        progress=progress if over_time else (),
        evidence=dict(places),
    )


def _latency(spec: DeviceSpec, rate_pps: float, duration_s: float) -> LatencySummary:
    """Return the latency of a simulated device: a constant, and a wait that grows with its load.

    The wait is exponentially distributed, with the mean of a queue with Poisson arrivals and constant
    service times (Pollaczek and Khinchine).
    """
    load = min(rate_pps / spec.capacity_pps, _MOST_LOAD)
    wait_us = 1e6 / spec.capacity_pps * load / (2 * (1 - load))
    samples = round(_LATENCY_SAMPLES_PPS * duration_s)
    quantiles = (0.5, 0.1, 0.01, 1 / max(samples, 1))
    return LatencySummary(samples, *(_BASE_LATENCY_US - wait_us * math.log(rest) for rest in quantiles))


# -- Faults of generators. ------------------------------------------------------------------------


def _receiver_drops(m: Measurement, asked: TrialRequest, rng: random.Random) -> Measurement:
    """Above its limit the receiver drops one frame in ten thousand and reports it."""
    missed = max(1, m.rx_packets // 10_000) if asked.rate_pps > _GENERATOR_LIMIT_PPS else 0
    return replace(m, rx_packets=m.rx_packets - missed, rx_errors=missed)


def _queue_drops(m: Measurement, asked: TrialRequest, rng: random.Random) -> Measurement:
    """Above its limit the transmit queue overflows: frames are counted as dropped, not as sent."""
    kept = min(1.0, _GENERATOR_LIMIT_PPS / asked.rate_pps)
    sent, received = int(m.tx_packets * kept), int(m.rx_packets * kept)
    return replace(m, tx_packets=sent, rx_packets=received, queue_drops=m.tx_packets - sent)


def _sometimes_short(m: Measurement, asked: TrialRequest, rng: random.Random) -> Measurement:
    """One trial in ten sends 1 % less than requested."""
    if m.aborted or rng.random() > 0.1:
        return m
    less = m.tx_packets // 100
    return replace(m, tx_packets=m.tx_packets - less, rx_packets=max(0, m.rx_packets - less))


def _wrapping(m: Measurement, asked: TrialRequest, rng: random.Random) -> Measurement:
    """In one trial of ten a 32-bit counter has wrapped."""
    return replace(m, rx_packets=m.rx_packets - 2**32) if rng.random() < 0.1 else m


def _more_than_sent(m: Measurement, asked: TrialRequest, rng: random.Random) -> Measurement:
    """One trial in ten also counts frames in flight from the previous trial."""
    return replace(m, rx_packets=m.tx_packets + 700) if rng.random() < 0.1 else m


_CLEAN = DEVICES["clean"]
_LIMITED = ((_CLEAN,), "generator_limited")
_FLOORS = ("glitch", "glitch-window", "glitch-random", "frame-errors")

FAMILIES: dict[str, SimFamily] = {
    family.name: family
    for family in (
        *(SimFamily(name, (spec,), "floor" if name in _FLOORS else "ndr") for name, spec in DEVICES.items()),
        SimFamily("one-direction", tuple(replace(_CLEAN, capacity_pps=most) for most in (2.1e6, 1.9e6))),
        SimFamily(
            "dead-direction", (_CLEAN, replace(_CLEAN, capacity_pps=1e-9, ring_packets=0)), "dead_direction"
        ),
        SimFamily("short-generator", *_LIMITED, _GENERATOR_LIMIT_PPS),
        SimFamily("late-generator", *_LIMITED, _GENERATOR_LIMIT_PPS, stretches=True),
        SimFamily("dropping-generator", *_LIMITED, fault=_receiver_drops),
        SimFamily("queue-drops", *_LIMITED, fault=_queue_drops),
        SimFamily("flaky-generator", (_CLEAN,), fault=_sometimes_short),
        SimFamily("negative-counters", (_CLEAN,), fault=_wrapping),
        SimFamily("more-than-sent", (_CLEAN,), fault=_more_than_sent),
    )
}


def sim_generator(name: str, seed: str, capacity_pps: float | None = None) -> SimGenerator:
    """Create the simulated generator of this name with its own random stream. Raises: UnusableInput.

    ``capacity_pps`` overrides the total capacity of all directions.
    """
    if name not in FAMILIES:
        raise UnusableInput("--sim-device", f"no {name!r}; there are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[name]
    if capacity_pps is not None:
        scale = capacity_pps / sum(device.capacity_pps for device in family.devices)
        devices = (replace(d, capacity_pps=d.capacity_pps * scale) for d in family.devices)
        family = replace(family, devices=tuple(devices))
    # Seeding with a string is stable across machines and processes.
    return SimGenerator(family, random.Random(f"{seed}/{name}"))
