"""``python -m agents.api.document``: print the OpenAPI document of the API, as ``/openapi.json`` has it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import cast

from agents.api.application import Application
from agents.api.http import build
from agents.api.tasks import TaskRunner
from agents.off_loop import OffLoop
from agents.service import Service
from agents.telemetry.metrics import Metrics


def routes() -> Application:
    """Return the application without what serves its calls: it can only describe itself."""
    parts = SimpleNamespace(off_loop=OffLoop(), physical_networks=None, service_ports=None)
    return build(cast(Service, parts), cast(TaskRunner, None), cast(Metrics, None))


if __name__ == "__main__":
    json.dump(routes().openapi(), sys.stdout, indent=1, sort_keys=True, ensure_ascii=False)
    print()
