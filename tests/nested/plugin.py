"""pytest's side on the outside: runs the tests marked `nested` in guests, as if they ran here.

The tests are collected here and again in the guest. Each report comes back the moment it is made
and is given to pytest's own hooks, so that progress, summary, junit file and exit status are made
from all of them as usual.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.lab.processes import LabError, LabTimeout
from tests.nested import machine, prepare
from tests.nested.machine import BootError, Job, Machine, Needs, StalledError
from tests.nested.prepare import Parts
from tests.nested.reporter import Reporter

MARKER = "nested(cpus, memory_mb, hugepages): runs in a guest with Debian's 6.12 kernel"
ATTEMPTS = 3
# From process 1 of the guest to the first action of pytest in it.
START_DEADLINE_S = 180.0
# What a test may take beyond its own timeout, to be set up, torn down and reported.
SLACK_S = 60.0
NO_TIMEOUT_S = 3600.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Phase = Literal["setup", "teardown"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if not machine.inside():
        config.pluginmanager.register(Outside(config), "nested-outside")
        return
    # Only the pytest that init started: not one that a test starts.
    channel = os.environ.pop(machine.CHANNEL, None)
    if channel is not None:
        config.pluginmanager.register(Reporter(config, open(int(channel), "wb")))


@dataclass
class Run:
    """One guest's share of the tests."""

    needs: Needs
    items: Sequence[pytest.Item]
    reported: dict[str, str] = field(default_factory=dict)
    """The phase that was last reported of a test."""
    replaced: str = ""
    """Why another guest took its place."""
    started: float = field(default_factory=time.monotonic)
    up_s: float = 0.0
    session_s: float = 0.0
    ended_s: float = 0.0

    def age(self) -> float:
        return time.monotonic() - self.started

    def unfinished(self) -> Iterator[pytest.Item]:
        return (item for item in self.items if self.reported.get(item.nodeid) != "teardown")

    def left(self) -> list[pytest.Item]:
        """What has not run: whether a test failed is known when it was called."""
        ran = ("call", "teardown")
        return [item for item in self.items if self.reported.get(item.nodeid) not in ran]

    def __str__(self) -> str:
        return (
            f"{self.needs}: up after {self.up_s:.1f} s, pytest after {self.session_s:.1f} s,"
            f" ended after {self.ended_s:.1f} s, tests: {len(self.items)}"
        )


class Outside:
    """Takes the nested tests out of pytest's own loop and runs them in guests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._runs: list[Run] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("nested"):
                needs_of(item)
                item.add_marker("outside")  # like those, they need no sandbox around them

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        nested = [item for item in session.items if item.get_closest_marker("nested")]
        if not nested or self._config.option.collectonly:
            return (yield)
        try:
            parts = available()
        except LabError as error:
            for item in nested:
                item.add_marker(pytest.mark.skip(reason=f"no guest can be had: {error}"))
            return (yield)
        session.items = [item for item in session.items if item not in set(nested)]
        result = yield
        for needs, items in grouped(nested).items():
            self.run_group(session, parts, needs, items)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._runs:
            terminalreporter.section("guests")
        for run in self._runs:
            terminalreporter.write_line(str(run))
            if run.replaced:
                terminalreporter.write_line(
                    f"replaced by a fresh guest for the {len(run.left())} tests that were left:"
                    f" {run.replaced}",
                    red=True,
                )

    def run_group(
        self, session: pytest.Session, parts: Parts, needs: Needs, items: list[pytest.Item]
    ) -> None:
        """Run some tests in one guest. Another takes its place, for what is left of them, if it does
        not come as far as pytest or if its heart stops.
        """
        for number in range(1, ATTEMPTS + 1):
            run = Run(needs, items)
            self._runs.append(run)
            try:
                reason = self._in_guest(session, parts, run, number)
            except LabError as error:
                if isinstance(error, BootError | StalledError) and number < ATTEMPTS:
                    run.replaced, items = str(error), run.left()
                    if items:
                        continue
                    return
                reason = str(error)
            finally:
                run.ended_s = run.age()
            return self._report_missing(session, run, reason)

    def _in_guest(self, session: pytest.Session, parts: Parts, run: Run, number: int) -> str:
        """Replay what comes from a guest; returns why it may be that not all has come."""
        with machine.started(run.needs, parts, self._job(parts, run.items, number)) as guest:
            boot(guest, run)
            limit = max(_timeout(item) for item in run.items) + SLACK_S
            while (message := guest.receive(limit)) is not None:
                if message["event"] == "ended":
                    return f"pytest ended with {message['status']} in the guest\n{guest.tail()}"
                self._replay(session, run, message["data"])
            return f"the guest ended\n{guest.tail()}"

    def _replay(self, session: pytest.Session, run: Run, data: dict[str, Any]) -> None:
        hook, data = self._config.hook, with_tuples(data)
        self._log(session, run, hook.pytest_report_from_serializable(config=self._config, data=data))

    def _log(self, session: pytest.Session, run: Run, report: pytest.TestReport) -> None:
        hook = self._config.hook
        if report.nodeid not in run.reported:
            hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
        run.reported[report.nodeid] = report.when
        hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        # As in pytest's own loop.
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _report_missing(self, session: pytest.Session, run: Run, reason: str) -> None:
        """What was not reported to its end is an error; the first of them tells all."""
        for item in list(run.unfinished()):
            when: Phase = "teardown" if item.nodeid in run.reported else "setup"
            self._log(session, run, _error(item, when, reason))
            reason = reason.partition("\n")[0]

    def _job(self, parts: Parts, items: Sequence[pytest.Item], number: int) -> Job:
        config = self._config
        return Job(
            command=inner_command(config, [item.nodeid for item in items]),
            directory=str(config.invocation_params.dir),
            environment={**inner_environment(os.environ), machine.GUEST: str(number)},
            modules=str(parts.kernel.modules),
        )


def available() -> Parts:
    """What guests are made of; an error says why there can be none."""
    if os.geteuid() != 0:
        raise LabError("it needs root, whose files it shares with the guest")
    machine.check_visible(Path(sys.executable), machine.CHECKOUT)
    return prepare.fetch()


def needs_of(item: pytest.Item) -> Needs:
    marker = item.get_closest_marker("nested")
    try:
        return Needs(**(marker.kwargs if marker else {}))
    except (TypeError, LabError) as error:
        raise pytest.UsageError(f"{item.nodeid}: marker nested: {error}") from error


def grouped(items: Sequence[pytest.Item]) -> dict[Needs, list[pytest.Item]]:
    """Which tests share a guest, in the order they were collected."""
    groups: dict[Needs, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(needs_of(item), []).append(item)
    return groups


def inner_command(config: pytest.Config, nodeids: Sequence[str]) -> list[str]:
    """The pytest in the guest: called as the outer one, but with these tests only."""
    places = set(config.option.file_or_dir)
    options = [arg for arg in config.invocation_params.args if arg not in places]
    found = ["-c", str(config.inipath)] if config.inipath else []
    # The last of an option counts.
    own = [*found, f"--rootdir={config.rootpath}", "--basetemp=/run/pytest", "--junit-xml="]
    # Nothing nested uses xdist, and without KVM to import it takes long.
    own += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", __name__]
    warnings = [f"-W{option}" for option in sys.warnoptions]
    tests = [str(config.rootpath / nodeid) for nodeid in nodeids]
    return [sys.executable, *warnings, "-m", "pytest", *options, *own, *tests]


def inner_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The same as outside, with the checkout and the system's programs in reach."""
    python = [str(machine.CHECKOUT), *filter(None, [outer.get("PYTHONPATH")])]
    path = [*filter(None, [outer.get("PATH")]), SYSTEM_PATH]
    return {**outer, "PYTHONPATH": os.pathsep.join(python), "PATH": os.pathsep.join(path)}


def with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """A report's fields with the tuples that JSON made lists; a skip's reason has to be one."""
    lists = [name for name in ("location", "longrepr") if isinstance(data.get(name), list)]
    properties = [tuple(pair) for pair in data.get("user_properties", ())]
    return {**data, **{name: tuple(data[name]) for name in lists}, "user_properties": properties}


def boot(guest: Machine, run: Run) -> None:
    """Wait until the pytest in the guest has begun."""
    try:
        _expect(guest, "up", machine.BOOT_DEADLINE_S)
        run.up_s = run.age()
        _expect(guest, "session", START_DEADLINE_S)
        run.session_s = run.age()
    except LabTimeout as late:
        raise BootError(f"the guest did not boot: {late}") from late


def _expect(guest: Machine, event: str, deadline_s: float) -> None:
    message = guest.receive(deadline_s)
    if message is None:
        raise BootError(f"the guest did not boot: it ended before `{event}`\n{guest.tail()}")
    if message["event"] != event:
        raise LabError(f"the guest said {message} instead of `{event}`\n{guest.tail()}")


def _timeout(item: pytest.Item) -> float:
    """How long pytest-timeout lets a test run."""
    given: Any = None
    if marker := item.get_closest_marker("timeout"):
        given = marker.kwargs.get("timeout", *marker.args[:1])
    if given is None:
        given = item.config.getoption("timeout", None)
    if given is None and item.config.pluginmanager.has_plugin("timeout"):
        given = item.config.getini("timeout")
    return float(given or NO_TIMEOUT_S)


def _error(item: pytest.Item, when: Phase, reason: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, when)
