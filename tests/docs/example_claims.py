"""The example with claims: its ports share a few numbered slots instead of having a file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from netplugin.api.errors import CapacityExhausted
from netplugin.backend import Claim, Intent
from netplugin.optional import NeedsClaims
from tests.docs.example_backend import Files, FilesSeen, owner_of

SLOTS = ("0", "1", "2")


class Slots(Files, NeedsClaims[FilesSeen]):
    name: ClassVar[str] = "slots"

    def claims(self, intent: Intent, observed: FilesSeen, taken: Mapping[Claim, str]) -> tuple[Claim, ...]:
        if intent.claims:
            return intent.claims  # a port keeps its slot
        texts, mine = observed.texts, intent.port_id
        # The slot that has the port comes first: after a lost store it stays there.
        for slot in sorted(SLOTS, key=lambda slot: owner_of(texts.get(slot, "")) != mine):
            claim = Claim("slot", slot)
            is_free = slot not in texts or owner_of(texts[slot]) == mine
            if is_free and taken.get(claim, mine) == mine:
                return (claim,)
        raise CapacityExhausted(f"all {len(SLOTS)} slots are taken", step="claim")

    def file_of(self, intent: Intent) -> str:
        (claim,) = intent.claims
        return claim.key
