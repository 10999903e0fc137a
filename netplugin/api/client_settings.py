"""What a client of the agent is given: its URL, token and certificates, checked before they are used."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from netplugin.api.errors import InvalidRequest, reason

DEFAULT_URL = "unix:/run/netplugin/agent.sock"
UNIX = "unix:"


def invalid(detail: str, fix: str) -> InvalidRequest:
    return InvalidRequest(detail, step="client", fix=fix)


def checked_url(url: str) -> str:
    fix = f"give it as {DEFAULT_URL} or https://host:port (NETPLUGIN_URL)"
    if url.startswith(UNIX):
        path = url.removeprefix(UNIX)
        if not path.startswith("/") or len(path.encode()) > 107:  # unix(7): sun_path
            raise invalid(f"{url!r} names no absolute path of at most 107 bytes", fix)
        return url
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        raise invalid(f"{url!r} is not a URL", fix) from None
    if (
        not (usable and url.isascii() and url.isprintable())
        or " " in url
        or parts.query
        or parts.fragment
        or parts.username is not None
    ):
        raise invalid(f"{url!r} is not the URL of an agent", fix)
    return url.rstrip("/")


def checked_token(token: str) -> str:
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise invalid("the bearer token has characters that cannot be sent", "use one line of the token file")
    return token


def read_token(path: Path) -> str:
    """The first token of a file in the format of ``[api] token_file``."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as wrong:
        raise invalid(
            f"NETPLUGIN_TOKEN_FILE {path} cannot be read: {reason(wrong)}", "name a file that holds a token"
        ) from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise invalid(f"NETPLUGIN_TOKEN_FILE {path} has no token in it", "put one on a line")
    return tokens[0].split()[-1]  # <token>, or <role>:<name> <token>


def tls(verify: bool | str | Path | ssl.SSLContext, cert: tuple[str, str] | str | None) -> ssl.SSLContext:
    """The TLS context; without a CA file, the system's CA certificates are used."""
    try:
        context = _trust(verify)
        if isinstance(cert, str):
            context.load_cert_chain(cert)
        elif cert is not None:
            context.load_cert_chain(*cert)
    except OSError as wrong:  # includes ssl.SSLError
        raise invalid(
            f"a certificate or key file cannot be used: {reason(wrong)}",
            "look at the files of NETPLUGIN_CA, NETPLUGIN_CERT and NETPLUGIN_KEY",
        ) from None
    return context


def _trust(verify: bool | str | Path | ssl.SSLContext) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    if isinstance(verify, bool):
        context = ssl.create_default_context()
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=verify)
