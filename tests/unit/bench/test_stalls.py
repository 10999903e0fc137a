"""What vswitchd's log says of its main loop."""

from __future__ import annotations

from tests.bench.stalls import logged_ms

LOG = """\
2026-11-21T10:00:01.123Z|00102|timeval|WARN|Unreasonably long 1752ms poll interval (1500ms user, 12ms system)
2026-11-21T10:00:01.124Z|00103|timeval|WARN|faults: 123 minor, 0 major
2026-11-21T10:00:01.125Z|00104|coverage|INFO|Event coverage, avg rate over last: 5 seconds
2026-11-21T10:00:09.000Z|00110|timeval(pmd-c01/id:8)|WARN|Unreasonably long 1003ms poll interval (1ms user)
"""


def test_the_waits_of_the_log() -> None:
    assert logged_ms(LOG) == [1752.0]
    assert logged_ms("") == []
