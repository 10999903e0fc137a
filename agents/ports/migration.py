"""The phases of a port that migrates: what each call, and the guest itself, makes of them (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from netplugin.api.errors import Conflict, NotFound
from netplugin.api.migration import Activation, Migration, MigrationPhase
from netplugin.api.migration_models import MigrationStep
from netplugin.api.models import PortSpec

_PREPARED, _ACTIVATED, _COMMITTED = (
    MigrationPhase.PREPARED,
    MigrationPhase.ACTIVATED,
    MigrationPhase.COMMITTED,
)
_LEAVING, _LEFT, _RETURNED = MigrationPhase.LEAVING, MigrationPhase.LEFT, MigrationPhase.RETURNED
#: Seconds for which a start of the agent announces ports again that were opened before.
_NEWS_S = 60.0
#: What the calls without a spec make of a port in a phase (None: it was never migrated); what is in
#: neither table is a conflict.
_NEXT: dict[tuple[MigrationStep, MigrationPhase | None], MigrationPhase] = {
    ("activate", _PREPARED): _ACTIVATED,
    ("activate", _ACTIVATED): _ACTIVATED,
    ("commit", _PREPARED): _COMMITTED,
    ("commit", _ACTIVATED): _COMMITTED,
    ("commit", _COMMITTED): _COMMITTED,
    ("leave", None): _LEFT,
    ("leave", _COMMITTED): _LEFT,
    ("leave", _RETURNED): _LEFT,
    ("leave", _LEAVING): _LEFT,
    ("leave", _LEFT): _LEFT,
    ("abort", _LEAVING): _RETURNED,
    ("abort", _LEFT): _RETURNED,
    ("abort", _RETURNED): _RETURNED,
}
_REMOVES: frozenset[tuple[MigrationStep, MigrationPhase | None]] = frozenset(
    {("commit", _LEAVING), ("commit", _LEFT), ("abort", _PREPARED), ("abort", _ACTIVATED)}
)
#: Without a port they have nothing to do: they remove one, or their answer was lost.
_GONE: frozenset[MigrationStep] = frozenset({"commit", "abort"})


@dataclass(frozen=True)
class Outcome:
    """What a call makes of a port: its migration from now on, or (``removes``) that it is removed."""

    migration: Migration | None = None
    removes: bool = False


def outcome(
    step: MigrationStep,
    activation: Activation | None,
    spec: PortSpec | None,
    there: tuple[PortSpec, Migration | None] | None,
    now: datetime,
) -> Outcome:
    """What becomes of a port. ``there``: its spec and migration; None without a port.

    ``spec`` is that of ``prepare``. Raises: Conflict, NotFound.
    """
    mode = activation or "manual"
    if there is None:
        if step == "prepare":
            return Outcome(Migration(phase=_PREPARED, activation=mode, since=now))
        if step in _GONE:
            return Outcome(removes=True)
        raise NotFound("there is no such port here", step="migrate")
    stored, had = there
    phase = had.phase if had else None
    if step == "prepare":
        if had is None or phase is not _PREPARED:
            raise _conflict(step, had)
        if spec != stored or had.activation != mode:
            raise Conflict(
                "the port is prepared already, with another spec or another activation",
                step="migrate",
                fix="abort this migration and prepare the port again",
            )
        return Outcome(had)
    if (step, phase) in _REMOVES:
        return Outcome(removes=True)
    to = _NEXT.get((step, phase))
    if to is None:
        raise _conflict(step, had)
    if step == "leave":
        if mode == "auto" and phase in (_LEAVING, _LEFT):
            return Outcome(had)
        if mode == "auto":
            to = _LEAVING
        return Outcome(had if had and had.phase is to else Migration(phase=to, activation=mode, since=now))
    if had is None or to is phase:
        return Outcome(had)
    return Outcome(Migration(phase=to, activation=had.activation, since=now))


def followed(migration: Migration | None, guest: bool | None, now: datetime) -> Migration | None:
    """The migration after what the host shows of the guest: whether it runs here; None: not known.

    A port that left because its guest stopped is opened again if the guest goes on here: the
    migration has failed, or OVS was restarted.
    """
    if migration is None or migration.activation != "auto" or guest is None:
        return migration
    to = {
        (_PREPARED, True): _ACTIVATED,
        (_LEAVING, False): _LEFT,
        (_LEFT, True): _LEAVING,
    }.get((migration.phase, guest))
    return Migration(phase=to, activation="auto", since=now) if to else migration


def is_closed(migration: Migration | None, shut_without_guest: bool) -> bool:
    """Whether nothing may be forwarded from or to a port, because of its migration.

    With ``auto`` a port that the host shuts while no guest runs (``shut_without_guest``) is not closed before
    the guest runs: no frame waits for the agent then.
    """
    if migration is None or not migration.is_closed:
        return False
    waits = migration.activation == "auto" and migration.phase is _PREPARED
    return not (waits and shut_without_guest)


def follows_guest(migration: Migration | None) -> bool:
    """Whether the agent waits for the guest of a port to run here, or to stop."""
    return migration is not None and migration.activation == "auto" and not migration.has_ended


def opens(had: Migration | None, has: Migration | None) -> bool:
    """Whether the network has to learn that the port is here: it is open now, and was not before.

    A port that was ``leaving`` is announced too when it has returned: the VM may have run elsewhere.
    """
    if has is None or has.is_closed or had is None:
        return False
    return had.is_closed or (had.phase, has.phase) == (_LEAVING, _RETURNED)


def hands_over(had: Migration | None, has: Migration | None) -> bool:
    """Whether the guest has just stopped here, so that the destination may announce the port."""
    return had is not None and has is not None and (had.phase, has.phase) == (_LEAVING, _LEFT)


def is_news(migration: Migration | None, now: datetime) -> bool:
    """Whether the port may have been opened so lately that an agent that was killed then announced it to
    nobody."""
    return (
        migration is not None
        and not migration.is_closed
        and abs((now - migration.since).total_seconds()) < _NEWS_S
    )


def refuse_in_migration(migration: Migration | None) -> None:
    """Raises: Conflict for a port that is being migrated, which only ``:migrate`` and DELETE change."""
    if migration is not None and not migration.has_ended:
        raise Conflict(
            f"the port is being migrated: it is {migration.phase.value}",
            step="migrate",
            fix="commit or abort the migration first: POST /v1/ports/PORT:migrate",
        )


def _conflict(step: MigrationStep, had: Migration | None) -> Conflict:
    if had is None or had.has_ended:
        how = f", {had.phase.value}" if had else ""
        phase = f"is not being migrated (an ordinary port{how})"
    else:
        phase = f"is {had.phase.value}"
    return Conflict(
        f"the port {phase}: {step} does not follow",
        step="migrate",
        fix="GET /v1/ports/PORT shows the phase; the API's documentation has what may follow it",
    )
