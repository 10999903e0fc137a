"""What one run knows of a cell's rate: bounds, the answers of repeats, and how sharp the limit is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from netplugin.acceptance.matrix.records import CellRecord
from netplugin.acceptance.outcome import SearchVerdict

#: How good a verdict is: a comparison takes one that is lower for a regression.
_WORTH: Final[Mapping[str, int]] = {
    SearchVerdict.NDR: 2,
    SearchVerdict.VNF_LIMITED: 2,
    SearchVerdict.GENERATOR_LIMITED: 2,
    SearchVerdict.FLOOR: 1,
    SearchVerdict.FAILED: 0,
}
#: Of the lowest rate that lost.
_JUST_ABOVE: Final = 1.05


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one cell of one run, in packets a second of both directions together."""

    verdict: str
    reason: str
    #: Of each repeat: its rate, or 0 for a floor. Repeats without a verdict are left out.
    rates: tuple[float, ...] = ()
    #: The rate is not below ``lower`` and not above ``upper``, over all repeats.
    lower: float = 0.0
    upper: float = math.inf
    rate: float | None = None
    #: Of the goal: how close bounds are asked to be.
    width: float = 0.0
    #: Loss sets in at once above the limit, so another search would find the same.
    sharp: bool = False

    @property
    def worth(self) -> int:
        return _WORTH[self.verdict]

    @property
    def has_bounds(self) -> bool:
        return self.worth == _WORTH[SearchVerdict.NDR]


def answers_of(record: CellRecord) -> Answers:
    """What the record says, whatever its verdict."""
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
        # The bounds are those of one repeat; of the others the answer is the lower one.
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
    """No trial just above the limit lost later than a device does that has a limit and nothing else.

    Half a width above its limit that fills its rings and then loses, within short trials' time in any
    case. Loss that comes later is a matter of chance, and so is the answer. Without early abort
    nothing tells when a full trial lost: then the limit does not count as sharp.
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
