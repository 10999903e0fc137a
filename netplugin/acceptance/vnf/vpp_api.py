"""VPP's binary API through vpp-papi, with checks of every reply's ``retval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netplugin.acceptance.vnf.contract import VnfError

_ANSWER_S = 10


class Api:
    """One connection. Messages and fields are those of VPP's ``.api`` files. The caller closes it."""

    def __init__(self, socket: Path) -> None:
        """Connect. Raises: VnfError."""
        try:
            from vpp_papi import VPPApiClient
        except ImportError as error:
            raise VnfError(
                "the VNF vpp needs FD.io's client: pip install 'netplugin[vpp]' (vpp-papi)"
            ) from error
        # VPP sends its message definitions: no version-specific files are needed.
        self._client: Any = VPPApiClient(
            bootstrapapi=True, server_address=str(socket), read_timeout=_ANSWER_S
        )
        try:
            self._client.connect("netplugin")
        except Exception as error:  # vpp-papi raises many types, some plain Exception
            raise VnfError(f"VPP's API at {socket} does not answer: {error!r}") from error

    def call(self, message: str, **fields: Any) -> Any:
        """Send a message and return the reply. Raises: VnfError if VPP rejects it or does not answer."""
        reply = self._ask(message, fields)
        if reply is None:
            raise VnfError(f"VPP: no answer to {message}")
        if getattr(reply, "retval", 0):
            raise VnfError(f"VPP refuses {message}({_short(fields)}): retval {reply.retval}")
        return reply

    def dump(self, message: str, **fields: Any) -> list[Any]:
        """Send a dump message and return all details. Raises: VnfError."""
        return list(self._ask(message, fields) or [])

    def close(self) -> None:
        try:
            self._client.disconnect()
        except Exception as error:  # VPP may have ended; nothing to release
            self._gone = error

    def _ask(self, message: str, fields: dict[str, Any]) -> Any:
        function = getattr(self._client.api, message, None)
        if function is None:
            raise VnfError(f"this VPP has no message {message}: is the plug-in that has it loaded?")
        try:
            return function(**fields)
        except Exception as error:  # as above
            raise VnfError(f"VPP: {message}({_short(fields)}): {error!r}") from error


def _short(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in fields.items())
