"""Takes the samples of a run as they come, and gives them as series."""

from __future__ import annotations

from tests.bench.values import Series

_Key = tuple[str, str, str, int | None, int | None, float | None]


class Recorder:
    """Samples of one identity are one series, in the order in which they came."""

    def __init__(self) -> None:
        self._samples: dict[_Key, list[float]] = {}
        self._units: dict[_Key, str] = {}
        self.notes: list[str] = []

    def add(
        self,
        workload: str,
        figure: str,
        *values: float,
        way: str = "agent",
        ports: int | None = None,
        addresses: int | None = None,
        rate: float | None = None,
        unit: str = "ms",
    ) -> None:
        key = workload, figure, way, ports, addresses, rate
        if self._units.setdefault(key, unit) != unit:
            raise ValueError(f"{key} is measured in {self._units[key]} and {unit}")
        self._samples.setdefault(key, []).extend(round(value, 4) for value in values)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def series(self) -> tuple[Series, ...]:
        return tuple(
            Series(
                workload=key[0],
                figure=key[1],
                way=key[2],
                ports=key[3],
                addresses=key[4],
                rate=key[5],
                unit=self._units[key],
                samples=tuple(samples),
            )
            for key, samples in self._samples.items()
        )
