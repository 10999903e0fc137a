"""Detects load-independent loss with control trials at a tenth of the forwarding rate."""

from __future__ import annotations

from netplugin_zeroloss.search.context import ROUNDING, SearchContext
from netplugin_zeroloss.search.outcome import Floor, Outcome, SearchVerdict
from netplugin_zeroloss.search.trials import Asking, Trial

#: Load of a control trial as a fraction of the forwarding rate.
_CONTROL = 0.1
#: Lossy control trials that prove load-independent loss, and passed ones that exclude it.
CONTROLS_LOST = 2
CONTROLS_PASSED = 3


class FloorTest:
    """Runs full-length control trials far below capacity and evaluates them."""

    def __init__(self, ground: SearchContext) -> None:
        self._ground = ground

    def counts(self) -> tuple[int, int]:
        """Return the numbers of passed and lossy full-length control trials."""
        seen = [
            t
            for t in self._ground.log.counted()
            if t.rate <= self._control_rate() * (1 + ROUNDING)
            and t.request.duration_s >= self._ground.goal.final_trial_s * (1 - ROUNDING)
        ]
        lost = sum(1 for t in seen if t.lossy)
        return len(seen) - lost, lost

    def trial(self) -> Asking[Trial]:
        """Run one control trial."""
        rate = min(self._control_rate(), self._ground.log.upper())
        return (yield from self._ground.ask(rate, self._ground.goal.final_trial_s, "is there a floor?"))

    def search(self, rate: float) -> Asking[Outcome]:
        """Run control trials after short trials lost at the lowest loads. Raises: BudgetExhausted."""
        for _ in range(CONTROLS_LOST + CONTROLS_PASSED):
            if self.counts()[1] >= CONTROLS_LOST:
                return self.outcome()
            trial = yield from self._ground.ask(
                min(rate, self._control_rate()),
                self._ground.goal.final_trial_s,
                "is there a floor?",
            )
            if not trial.valid:
                return self._ground.generator_limited(0.0)
            if trial.passed and self._ground.log.lower(self._ground.goal) is not None:
                break
        return self._ground.failed("it loses at nearly every rate, and not always at the lowest")

    def outcome(self) -> Outcome:
        """Return the outcome ``FLOOR``, measured over all trials at or below the control load."""
        limit = self._control_rate() * (1 + ROUNDING)
        trials = [t for t in self._ground.log.counted() if t.rate <= limit]
        lossy = [t for t in trials if t.lossy]
        sent = sum(t.measured.tx_packets for t in trials)
        lost = sum(t.judgement.lost_packets for t in lossy)
        traffic = sum(t.traffic_s for t in trials)
        floor = Floor(lost / sent, lost, len(lossy), traffic, _place(lossy))
        if floor.loss_ratio > 0.5:
            return self._ground.failed("the device forwards next to nothing: is it set up?")
        where = f", at {floor.place}" if floor.place else ""
        reason = (
            f"loss does not fall with the load: at a tenth of it {lost} frames were still lost,"
            f" {len(lossy)} times in {traffic:.0f} s{where}"
        )
        return Outcome(self._ground.goal, SearchVerdict.FLOOR, reason, 0.0, self._ground.log.upper(), floor)

    def _control_rate(self) -> float:
        reference = self._ground.forwarding_pps or self._ground.log.upper()
        return round(max(reference * _CONTROL, self._ground.least()), 2)


def _place(trials: list[Trial]) -> str | None:
    """Return the component that lost most frames."""
    places: dict[str, float] = {}
    for trial in trials:
        for place, count in trial.measured.evidence.items():
            places[place] = places.get(place, 0) + count
    losing = {place: count for place, count in places.items() if count > 0}
    return max(losing, key=lambda place: losing[place]) if losing else None
