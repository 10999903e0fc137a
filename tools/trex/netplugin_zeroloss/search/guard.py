"""Is one of two devices worse? Both are measured in turn, in rounds, until that is decided (pure).

In a round each device is set up and visited once: in random order, with the same trials, but B at loads that
are lower by a margin. If B is worse by exactly the margin, the visits are alike, and each is the lower one
with the same probability, whatever the distribution of the loss is, and however the machine drifts from round
to round. So a round is the toss of a coin, and a sequential sign test (``sign_odds``) counts the rounds. A
visit compares at two lengths of trials:

- *at once*: the load that loses a short trial half of the time, found by going up and down (Dixon and Mood,
  1948). It is near the capacity and hardly varies, so small differences show.
- *longer*: when is a frame lost at the rate that a search of A found? That varies much. It shows whether B
  loses where A does not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import fmean
from typing import Final

from netplugin.statistics import sign_odds
from netplugin_zeroloss.search.context import SearchContext
from netplugin_zeroloss.search.trials import Asking, BudgetExhausted, NotForwarding, SearchPlan, TrialLog

#: B is worse if it does less than this part of A: in short trials, between 0.95 and 0.98; and in longer ones.
AT_ONCE: Final = 0.965
LONGER: Final = 0.8
#: Length of the longer trials as a part of the goal's.
_LONGER_PART: Final = 1 / 4
#: Probability that any cell is called worse though none is, and that one is called not worse though it is.
LEVEL: Final = 0.02
MISSED: Final = 0.05
#: Visits in a row without a valid trial after which the generator is given up.
VOID: Final = 3
_MOST_ROUNDS: Final = 100
#: Steps of the up-and-down, the first and the last, and so many trials at the last are averaged.
_FIRST_STEP: Final = 0.04
_LAST_STEP: Final = 0.005
_AVERAGED: Final = 8
#: It ends at this part of the load that it began with: the device forwards next to nothing.
_LEAST: Final = 1 / 64
#: Load of the warm-up, as a part of the load that the up-and-down begins with.
_WARM_UP: Final = 0.5


class GuardVerdict(StrEnum):
    """Verdict on B; ``failed``: it was not measured."""

    WORSE = "worse"
    NOT_WORSE = "not worse"
    UNDECIDED = "undecided"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """What is compared. ``cells``: so many share the level."""

    plan: SearchPlan
    #: The rate that the search of A found; None: it has none, and only short trials are compared.
    rate_pps: float | None
    #: Where the first up-and-down begins.
    begin_pps: float
    #: Seed of the order of the visits.
    seed: str
    #: Seconds of traffic after which it stays undecided.
    traffic_s: float
    cells: int = 1


@dataclass(frozen=True, slots=True)
class Scores:
    """Result of a visit."""

    #: The load that loses a short trial, for B divided by ``AT_ONCE``.
    at_once_pps: float
    #: Whether nothing was lost at the highest load.
    at_top: bool
    #: Infinite if nothing was lost.
    lost_after_s: float = math.inf
    #: What was seen if it loses a tenth or more at any load; else empty.
    floor: str = ""


@dataclass(frozen=True, slots=True)
class Visit:
    """A device to set up, and the trials to run; ``number``: of all visits, from 0."""

    number: int
    round: int
    is_b: bool
    trials: Callable[[], Asking[Scores | None]]


@dataclass(frozen=True, slots=True)
class Visited:
    """Scores of a visit, None without a valid trial, and its seconds of traffic."""

    scores: Scores | None
    traffic_s: float
    #: Why there are none.
    why: str = "the generator did not do what was asked"


@dataclass(frozen=True, slots=True)
class Round:
    """The visits of A and B."""

    a: Scores
    b: Scores

    @property
    def ratio(self) -> float:
        """B's load that loses a short trial, over A's."""
        return AT_ONCE * self.b.at_once_pps / self.a.at_once_pps


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about B: that it is worse, or that it is not."""

    worse: bool
    words: str
    #: Rounds that support it, of those that do or contradict it.
    rounds: int
    of: int
    #: The probability that it is shown though it is false.
    level: float

    @property
    def shown(self) -> bool:
        return sign_odds(self.rounds, self.of) >= 1 / self.level

    def __str__(self) -> str:
        return f"{self.words} in {self.rounds} of {self.of} rounds"


@dataclass(frozen=True, slots=True)
class GuardFound:
    """The verdict on a cell, its rounds, and the claims that were tested."""

    verdict: GuardVerdict
    reason: str
    rounds: tuple[Round, ...] = ()
    claims: tuple[Claim, ...] = ()
    traffic_s: float = 0.0


def guard(asked: GuardPlan) -> Generator[Visit, Visited, GuardFound]:
    """Ask for visits until B is shown to be worse, or not to be, or the traffic is used up."""
    coin, begin = random.Random(asked.seed), asked.begin_pps
    rounds: tuple[Round, ...] = ()
    number, void, traffic_s, longest_s = 0, 0, 0.0, 0.0
    while True:
        before_s = traffic_s
        scores: dict[bool, Scores] = {}
        for is_b in coin.choice(((False, True), (True, False))):
            while is_b not in scores:
                trials = partial(visit, asked.plan, is_b, begin, asked.rate_pps)
                visited = yield Visit(number, len(rounds) + 1, is_b, trials)
                number, traffic_s = number + 1, traffic_s + visited.traffic_s
                void = 0 if visited.scores else void + 1
                if visited.scores:
                    scores[is_b] = visited.scores
                elif void == VOID:
                    reason = f"{'B' if is_b else 'A'}, {void} times in a row: {visited.why}"
                    return GuardFound(GuardVerdict.FAILED, reason, rounds, traffic_s=traffic_s)
        rounds = (*rounds, Round(scores[False], scores[True]))
        # The same for both sides, and from past rounds: the rounds remain tosses of a coin.
        begin = max(scores[False].at_once_pps, asked.begin_pps * _LEAST)
        longest_s = max(longest_s, traffic_s - before_s)
        found = _judged(asked, rounds, traffic_s, longest_s)
        if found is not None:
            return found


def visit(plan: SearchPlan, is_b: bool, begin_pps: float, rate_pps: float | None) -> Asking[Scores | None]:
    """Run the trials of a visit; None if the generator did not do what was asked.

    Raises: NotForwarding if a direction is dead. A device that loses at any load forwards, and is measured.
    """
    ground = SearchContext(plan, TrialLog(plan), plan.headline)
    part = AT_ONCE if is_b else 1.0
    try:
        yield from ground.warm_up(_WARM_UP * begin_pps * part, plan.warm_up_s)
        scores = yield from _up_and_down(ground, part, begin_pps)
        if scores is None or rate_pps is None:
            return scores
        load = rate_pps * (LONGER if is_b else 1.0)
        trial = yield from ground.ask(load, ground.goal.final_trial_s * _LONGER_PART, "longer")
    except BudgetExhausted:
        return None
    except NotForwarding as error:
        if error.outcome.floor is None:
            raise
        return Scores(begin_pps * _LEAST, at_top=False, lost_after_s=0.0, floor=error.outcome.reason)
    if not trial.valid:
        return None
    return replace(scores, lost_after_s=trial.traffic_s if trial.lossy else math.inf)


def _up_and_down(ground: SearchContext, part: float, begin_pps: float) -> Asking[Scores | None]:
    """Go up after a pass and down after a loss. Steps double until the first turn, and are halved at each.

    ``part``: of the load, is sent.
    """
    seconds, least = ground.resolution(begin_pps, 2 * _LAST_STEP), begin_pps * _LEAST
    load, step, turned, sent = min(begin_pps, ground.top), _FIRST_STEP, False, 0.0
    passed: bool | None = None
    averaged: list[float] = []
    while len(averaged) < _AVERAGED and load > least:
        trial = yield from ground.ask(load * part, seconds, "at once")
        # What is beyond the generator is above what it sent.
        if not (trial.valid or load > sent > 0):
            return None
        sent = max(sent, load if trial.valid else 0.0)
        if passed not in (None, trial.passed):
            step, turned = max(step / 2, _LAST_STEP), True
        elif passed is not None and not turned:
            step *= 2
        passed = trial.passed
        if step == _LAST_STEP or (passed and load == ground.top):
            averaged.append(load)
        load = min(load * (1 + step), ground.top) if passed else load / (1 + step)
    score = fmean(averaged) if averaged else load
    return Scores(score, score >= ground.top)


def _judged(
    asked: GuardPlan, rounds: tuple[Round, ...], traffic_s: float, longest_s: float
) -> GuardFound | None:
    """Return the verdict; None if there is none, and time for one more round."""
    claims = tuple(_claims(asked, rounds))
    shown = [claim for claim in claims if claim.shown]
    verdict, reasons = GuardVerdict.UNDECIDED, [claim for claim in claims if not claim.worse]
    if any(claim.worse for claim in shown):
        verdict, reasons = GuardVerdict.WORSE, [claim for claim in shown if claim.worse]
    elif all(claim.shown for claim in claims if not claim.worse):
        verdict = GuardVerdict.NOT_WORSE
    elif traffic_s + longest_s < asked.traffic_s and len(rounds) < _MOST_ROUNDS:
        return None
    floors = [f"in round {n}, {each.b.floor}" for n, each in enumerate(rounds, 1) if each.b.floor]
    reason = "; ".join((*map(str, reasons), *floors[-1:]))
    return GuardFound(verdict, reason, rounds, claims, traffic_s)


def _claims(asked: GuardPlan, rounds: Sequence[Round]) -> Sequence[Claim]:
    """Return what is claimed of B, with the rounds; those in which both did the same do not count."""
    lower = sum(r.b.at_once_pps < r.a.at_once_pps for r in rounds)
    higher = sum(r.b.at_once_pps > r.a.at_once_pps for r in rounds)
    # A may do more than the highest load, which cannot show; B does what could be seen of A.
    full = sum(r.b.at_top and r.b.at_once_pps == r.a.at_once_pps for r in rounds)
    at_once, longer = f"{AT_ONCE:.1%} of A at once", f"{LONGER:.0%} of A's rate"
    level = LEVEL / asked.cells / (1 if asked.rate_pps is None else 2)
    found = [
        Claim(True, f"it does less than {at_once}", lower, lower + higher, level),
        Claim(False, f"it does more than {at_once}", higher + full, lower + higher + full, MISSED),
    ]
    if asked.rate_pps is not None:
        sooner = sum(r.b.lost_after_s < r.a.lost_after_s for r in rounds)
        later = sum(r.b.lost_after_s > r.a.lost_after_s for r in rounds)
        passed = sum(math.isinf(r.b.lost_after_s) for r in rounds)
        seconds = asked.plan.headline.final_trial_s * _LONGER_PART
        found += [
            Claim(
                True, f"at {longer} it loses a frame sooner than A at its rate", sooner, sooner + later, level
            ),
            Claim(False, f"at {longer} it loses no frame in {seconds:g} s", passed, len(rounds), MISSED),
        ]
    return found
