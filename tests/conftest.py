"""For all tests: in CI nothing is skipped, how many examples hypothesis tries, and that
nested tests run in their guest or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import settings

from tests.nested import machine

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)

# The machine may be busy: no example has a deadline.
settings.register_profile("usual", deadline=None, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=5_000)
settings.load_profile("usual")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if machine.inside() or config.pluginmanager.has_plugin("tests.nested.plugin"):
        return
    for item in items:
        if item.get_closest_marker("nested"):
            item.add_marker(pytest.mark.skip(reason="runs in a guest only: tox -e nested"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_if_skipped((yield))


def _failed_if_skipped(report: R) -> R:
    """In CI what a test needs has to be there; an expected failure (xfail) is no skip."""
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"in CI nothing is skipped: {why}"
    return report
