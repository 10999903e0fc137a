"""What a user asks for, as the goals of a search: the headline, and what is measured beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from netplugin.acceptance.values import Goal, csit_ndr, csit_pdr

#: By the name that options and run descriptions have for them; each is given the precision.
OTHER_GOALS: Final[Mapping[str, Callable[[float], Goal]]] = {
    "csit-ndr": csit_ndr,
    "csit-pdr": csit_pdr,
}
#: Loss in the first part of a full trial may be that of a cold device.
_WARM_UP_PART: Final = 1 / 6


def headline(
    final_s: float, initial_s: float, precision: float, max_loss_ratio: float = 0.0
) -> Goal:
    """One full trial without (more) loss; a short one is no longer than that. Raises: UnusableInput."""
    return Goal(
        "zero-loss" if max_loss_ratio == 0 else "loss-ratio",
        max_loss_ratio, 0.0, min(initial_s, final_s), final_s, final_s, precision,
    )  # fmt: skip


def warm_up_s(given: float | None, final_s: float) -> float:
    """Seconds of traffic in which loss is not held against the device, if nothing is said of it too."""
    return final_s * _WARM_UP_PART if given is None else given
