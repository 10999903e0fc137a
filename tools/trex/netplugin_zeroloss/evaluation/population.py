"""A population of simulated devices by class, for figures that no single device decides.

It is fixed: device ``n`` of a class is drawn from a random stream seeded by the class and ``n`` alone. It
was committed before the search was tuned, and is not changed to suit it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from netplugin_zeroloss.generators.devices import DeviceSpec, Stalls
from netplugin_zeroloss.generators.sim import FAMILIES, SimFamily

#: Fault of a generator whose maximum rate is 3 Mpps, or of one that errs in some trials.
_LIMITED: Final = ("short-generator", "late-generator", "dropping-generator", "queue-drops")
_ERRING: Final = ("flaky-generator", "negative-counters", "more-than-sent")


def device_of(name: str, number: int) -> SimFamily:
    """Return a named device, or device ``number`` of a class."""
    if name not in CLASSES:
        return FAMILIES[name]
    drawn = CLASSES[name](random.Random(f"population/{name}/{number}"))
    return drawn if isinstance(drawn, SimFamily) else SimFamily(name, (drawn,))


def _clean(rng: random.Random) -> DeviceSpec:
    """Draw capacity and ring: some are faster than the line of 14.88 Mpps."""
    return DeviceSpec(_log(rng, 0.2e6, 16e6), rng.choice((256, 512, 1024, 1024, 2048, 2048, 4096)))


def _log(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _stalling(draw: Callable[[random.Random, float], Stalls]) -> Callable[[random.Random], DeviceSpec]:
    """Return how a device is drawn whose stalls are drawn from the time in which its ring fills up."""

    def device(rng: random.Random) -> DeviceSpec:
        spec = _clean(rng)
        return replace(spec, stalls=draw(rng, spec.ring_packets / spec.capacity_pps))

    return device


def _steps(rng: random.Random) -> DeviceSpec:
    """Draw a device that is slower every other few seconds, or slower or faster from some time on."""
    spec, size = _clean(rng), rng.uniform(0.01, 0.2)
    if rng.random() < 2 / 3:
        return replace(spec, step=size, step_s=rng.uniform(2, 25))
    return replace(spec, step=rng.choice((size, -size)), step_s=rng.uniform(5, 50), step_once=True)


def _drift(rng: random.Random) -> DeviceSpec:
    return replace(_clean(rng), drift=rng.uniform(-0.1, 0.15), drift_s=rng.uniform(5, 60))


def _generator(rng: random.Random) -> SimFamily:
    """Draw a fault, and a device that is clearly slower or faster than the generator's limit."""
    fault = rng.choice((*_LIMITED, *_ERRING))
    slower = rng.random() < 0.5
    capacity = _log(rng, 1e6, 2.8e6) if slower else _log(rng, 3.3e6, 14e6)
    verdict = "ndr" if slower or fault in _ERRING else "generator_limited"
    [device] = FAMILIES[fault].devices
    return replace(FAMILIES[fault], devices=(replace(device, capacity_pps=capacity),), verdict=verdict)


#: By the name in ``evaluate --devices``.
CLASSES: Final[Mapping[str, Callable[[random.Random], DeviceSpec | SimFamily]]] = {
    "class-clean": _clean,
    "class-frequent-stalls": _stalling(
        lambda rng, full_s: Stalls.exponential(_log(rng, 2, 100), full_s * rng.uniform(0.1, 0.25))
    ),
    "class-rare-stalls": _stalling(
        lambda rng, full_s: Stalls.exponential(_log(rng, 0.03, 1), full_s * rng.uniform(0.3, 1.5))
    ),
    "class-heavy-stalls": _stalling(
        lambda rng, full_s: Stalls.heavy(
            _log(rng, 0.3, 10), full_s * rng.uniform(0.1, 0.3), rng.uniform(1.8, 3.5)
        )
    ),
    "class-steps": _steps,
    "class-drift": _drift,
    "class-generator": _generator,
}
