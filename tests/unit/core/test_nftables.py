"""What nft answers, and what is no answer of nft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from netplugin.api.errors import HostError
from netplugin.host import nftables, vxlan

DEADLINE = 60.0  # nothing runs


READERS: dict[str, Callable[[], Any]] = {
    "nftables": lambda: nftables.Nftables("bridge", "netplugin").read(None, DEADLINE),
    "vxlan-filter": lambda: vxlan.VxlanFilter("10.0.0.1").read(DEADLINE),
}


@pytest.mark.parametrize("step", READERS)
@pytest.mark.parametrize(
    "answer", ["no JSON", "[]", "{}", '{"nftables": 1}', '{"nftables": [1]}', '{"nftables": [{}]}']
)
def test_an_answer_in_another_format_is_an_error_of_the_host(
    monkeypatch: pytest.MonkeyPatch, answer: str, step: str
) -> None:
    def run(*_: Any, **__: Any) -> str:
        return answer

    monkeypatch.setattr(nftables, "run", run)
    monkeypatch.setattr(vxlan, "run", run)
    with pytest.raises(HostError, match="nft") as refused:
        READERS[step]()
    assert refused.value.step == step
