"""Which quantiles may be said of so many samples, and how well they are known."""

from __future__ import annotations

import random

import pytest

from tests.bench.quantiles import fewest, quantile, three_digits


@pytest.mark.parametrize(("share", "count"), [(0.5, 2), (0.9, 10), (0.99, 100), (0.999, 1000)])
def test_a_quantile_is_printed_only_with_a_sample_beyond_it(share: float, count: int) -> None:
    assert fewest(share) == count
    assert quantile(range(count - 1), share) is None
    assert quantile(range(count), share) is not None


def test_the_value_is_a_sample_with_the_share_at_or_below_it() -> None:
    found = quantile([float(n) for n in range(1, 1001)], 0.99)
    assert found is not None and found.value == 990
    assert found.low < 990 and found.high is not None and found.high > 990


def test_the_upper_end_is_open_with_few_samples() -> None:
    few, many = quantile(range(100), 0.99), quantile(range(1000), 0.99)
    assert few is not None and few.high is None
    assert many is not None and many.high is not None


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_the_interval_has_the_quantile_as_often_as_it_says(share: float) -> None:
    """Of a uniform distribution the quantile is the share itself."""
    rng = random.Random(1)
    hits = 0
    for _ in range(400):
        found = quantile([rng.random() for _ in range(500)], share)
        assert found is not None and found.high is not None
        hits += found.low <= share <= found.high
    assert hits >= 400 * 0.92


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (999.4, "999"), (12345.6, "12,346"), (0, "0")]
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text
