"""For all tests: in CI nothing is skipped, how many examples hypothesis tries, and that
nested tests run in their guest or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import settings

from tests.lab import ovs_releases, sandbox
from tests.nested import machine

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)

# The machine may be busy: no example has a deadline.
settings.register_profile("usual", deadline=None, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=5_000)
settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ovs",
        choices=(ovs_releases.MACHINES_OWN, *ovs_releases.RELEASES),
        default=ovs_releases.MACHINES_OWN,
        help="which Open vSwitch the lab runs: the machine's own, or that of a newer Debian",
    )


def pytest_configure(config: pytest.Config) -> None:
    release = config.getoption("--ovs")
    if release != ovs_releases.MACHINES_OWN:
        programs = ovs_releases.chosen(release, fetched=sandbox.inside() or machine.inside())
        # What tests, the lab and the agents that they start look up: for this process and its children.
        os.environ["PATH"] = programs.path(os.environ["PATH"])


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption("--ovs") == ovs_releases.MACHINES_OWN:
        return []
    return [f"Open vSwitch {'.'.join(map(str, ovs_releases.OvsPrograms.in_path().version))}"]


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
