"""Whatever a program, the kernel or a file says: it is read, or refused by a typed error, in bounded time.

``NETPLUGIN_FUZZ_INPUTS`` is how many inputs are tried in all, ``NETPLUGIN_FUZZ_SEED`` where they begin: two
runs with other seeds have other inputs. An input is found again by its name, such as ``OpenFlow/0/17``.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from random import Random

import pytest
from hypothesis import settings

from tests.unit.fuzz.mutate import MOST, mutated
from tests.unit.fuzz.parsers import PARSERS, Parser

LONG = settings.get_current_profile_name() == "long"
INPUTS = int(os.environ.get("NETPLUGIN_FUZZ_INPUTS", 1_000_000 if LONG else 15_000))
SEED = os.environ.get("NETPLUGIN_FUZZ_SEED", "0")
#: Seconds of CPU that one input may take: a thousand times what the slowest takes.
_MOST_S = 20.0
#: Bytes that the process may grow by while one parser is tried.
_MOST_BYTES = 512 << 20


def number_of(parser: Parser) -> int:
    """Its share of all inputs, by what one costs."""
    shares = sum(1 / each.cost for each in PARSERS)
    return max(4, round(INPUTS / parser.cost / shares))


def tried(parser: Parser, name: str) -> str:
    """Try one input. Returns: ``read``, or the name of the error."""
    data = mutated(parser.samples(), Random(f"{parser.name}/{name}"))
    began = time.thread_time()
    try:
        parser.read(data)
        outcome = "read"
    except parser.errors as refused:
        assert str(refused), "an error without words"
        outcome = type(refused).__name__
    except Exception as wrong:
        wrong.add_note(f"input {parser.name}/{name}: {data[:2000]!r}")
        raise
    assert time.thread_time() - began < _MOST_S, f"{parser.name}/{name} takes too long: {data[:2000]!r}"
    return outcome


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_anything_is_read_or_refused(parser: Parser) -> None:
    for sample in parser.samples():
        assert len(sample) <= MOST
        parser.read(sample)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = Counter(tried(parser, f"{SEED}/{number}") for number in range(number_of(parser)))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < _MOST_BYTES
    print(f"{parser.name}: {outcomes.total()} inputs: {dict(outcomes.most_common())}")
    assert outcomes["read"], "all inputs were refused: they are too far from what is right"
