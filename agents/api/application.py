"""The ASGI application of the agent: its routes, and what it answers to errors of the router and itself."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from agents.api.problems import http_error, unexpected
from agents.api.routing import Route, Routes
from agents.off_loop import OffLoop


class Application(Starlette):
    """Makes its OpenAPI document when it is requested: that takes longer than all else at start."""

    def __init__(self, routes: Routes, off_loop: OffLoop) -> None:
        """Raises: TypeError for an endpoint that ``Route`` cannot serve."""
        super().__init__(
            routes=[Route(each) for each in routes.declared],
            exception_handlers={HTTPException: http_error, Exception: unexpected},
        )
        # A redirect would break mutating and asynchronous calls.
        self.router.redirect_slashes = False
        self.state.off_loop = off_loop
        self._declared = routes.declared
        self._document: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        """Return the document. Two threads that ask first both make it: it is the same."""
        if self._document is None:
            from agents.api.document import made_of

            self._document = made_of(self._declared)
        return self._document
