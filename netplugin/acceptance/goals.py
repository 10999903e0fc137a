"""Search goals from user options: the headline goal and the additional goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from netplugin.acceptance.values import Goal, csit_ndr, csit_pdr

#: Additional goals by their name in options and run descriptions; called with the relative width.
OTHER_GOALS: Final[Mapping[str, Callable[[float], Goal]]] = {
    "csit-ndr": csit_ndr,
    "csit-pdr": csit_pdr,
}
#: Default warm-up as a fraction of the full trial.
_WARM_UP_PART: Final = 1 / 6


def headline(
    final_s: float, initial_s: float, precision: float, max_loss_ratio: float = 0.0
) -> Goal:
    """Return the headline goal: one full-length trial without (more) loss. Raises: UnusableInput.

    Short trials are at most as long as the full one.
    """
    return Goal(
        "zero-loss" if max_loss_ratio == 0 else "loss-ratio",
        max_loss_ratio, 0.0, min(initial_s, final_s), final_s, final_s, precision,
    )  # fmt: skip


def warm_up_s(given: float | None, final_s: float) -> float:
    """Return the warm-up in seconds of traffic: ``given``, or the default part of the full trial."""
    return final_s * _WARM_UP_PART if given is None else given
