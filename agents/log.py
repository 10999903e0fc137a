"""The agent's log: JSON lines on standard error, with the port ID where there is one."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        port_id = getattr(record, "port_id", None)
        if port_id:
            line["port_id"] = port_id
        audit = getattr(record, "audit", None)
        if audit:
            line["audit"] = audit
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Their messages repeat what the agent logs itself.
    for chatty in ("ovsdbapp", "stevedore", "asyncio", "httpx", "httpcore", "uvicorn"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level)))
