"""What a run says about the rate of a cell: bounds, answers of repeats, and whether the limit is sharp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from netplugin.acceptance.matrix.records import CellRecord
from netplugin.acceptance.outcome import SearchVerdict

#: Rank of a verdict: a lower rank than before is a regression.
_WORTH: Final[Mapping[str, int]] = {
    SearchVerdict.NDR: 2,
    SearchVerdict.VNF_LIMITED: 2,
    SearchVerdict.GENERATOR_LIMITED: 2,
    SearchVerdict.FLOOR: 1,
    SearchVerdict.FAILED: 0,
}
#: Range above the lowest lossy load, as a factor.
_JUST_ABOVE: Final = 1.05


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one cell in one run, in pps of both directions together."""

    verdict: str
    reason: str
    #: Rate per repeat, or 0 for load-independent loss. Repeats without a verdict are left out.
    rates: tuple[float, ...] = ()
    #: Bounds of the rate over all repeats.
    lower: float = 0.0
    upper: float = math.inf
    rate: float | None = None
    #: Relative width of the goal.
    width: float = 0.0
    #: Loss starts immediately above the limit, so another search would give the same answer.
    sharp: bool = False

    @property
    def worth(self) -> int:
        return _WORTH[self.verdict]

    @property
    def has_bounds(self) -> bool:
        return self.worth == _WORTH[SearchVerdict.NDR]


def answers_of(record: CellRecord) -> Answers:
    """Return the answers of a record with any verdict."""
    if record.result is None:
        return Answers(record.verdict, record.error or "it ended without a result")
    result = record.result
    repeats = result["repeats"]
    quoted = [float(rate) for rate in repeats["answers_pps"] if rate is not None]
    floors = [0.0] * int(repeats["verdicts"].get(SearchVerdict.FLOOR, 0))
    lower, upper = result["bounds_pps"]
    if record.verdict == SearchVerdict.GENERATOR_LIMITED:
        upper = math.inf
    elif quoted:
        # The bounds belong to one repeat; for the others the answer is the lower bound.
        width = max(upper / lower, 1.0) if lower else 1.0
        lower, upper = (
            min([lower, *quoted]),
            max([upper, *(width * rate for rate in quoted)]),
        )
    return Answers(
        record.verdict, result["reason"], (*quoted, *floors), lower, upper, record.zero_loss_pps,
        float(result["goal"]["relative_width"]), _sharp(result),
    )  # fmt: skip


def _sharp(result: Mapping[str, Any]) -> bool:
    """Whether no trial just above the limit lost later than a device with a sharp limit would.

    Half a width above its limit such a device fills its rings and then loses, in any case within the
    time of short trials. Later loss is random, and so is the answer. Without early abort the time of
    loss in a full trial is unknown; the limit then does not count as sharp.
    """
    goal, plan = result["goal"], result["plan"]
    lossy = [trial for trial in result["trial_log"] if trial["verdict"] == "lossy"]
    lowest: dict[int, float] = {}
    for trial in lossy:
        number, rate = trial["repeat"], trial["rate_pps"]
        lowest[number] = min(rate, lowest.get(number, math.inf))
    return all(
        trial["measured"]["elapsed_s"]
        <= max(
            2 * goal["initial_trial_s"],
            2 * plan["buffer_packets"] / (goal["relative_width"] * trial["rate_pps"]),
        )
        for trial in lossy
        if trial["rate_pps"] <= lowest[trial["repeat"]] * _JUST_ABOVE
    )
