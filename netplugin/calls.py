"""The calls of the API in texts of the agent, as the commands of this command line.

The agent names a call where it says what to do, because most of its callers use HTTP: ``DELETE /v1/ports/p1``
or ``PUT /v1/pmd {"count": 4}``. Here it is ``netplugin port delete p1`` or ``netplugin pmd set --count 4``.
"""

from __future__ import annotations

import re
from typing import Final

_ID: Final = r"([\w.:-]*[\w-])"
#: Calls and their commands; the first that matches is taken. Patterns are compiled when one is needed.
_COMMANDS: Final = (
    (rf"DELETE /v1/vfs/{_ID}/quarantine", r"vf release \1"),
    (rf"POST /v1/ports/{_ID}:migrate\b", r"port migrate \1"),
    (rf"POST /v1/vms/{_ID}:render-domain", r"domain render \1"),
    (r"POST /v1/reconcile", "reconcile"),
    (r"GET /v1/pmd/proposal", "pmd show --propose"),
    (r"GET /v1/pmd", "pmd show"),
    (r"PUT /v1/pmd", "pmd set"),
    (r"GET /v1/host/checks", "backend check"),
    (rf"GET /v1/(port|physical-network)s/{_ID}", r"\1 show \2"),
    (r"GET /v1/(port|service-port|network|physical-network|backend|vf)s", r"\1 list"),
    (rf"PUT /v1/(port|service-port|network|physical-network)s/{_ID}", r"\1 put \2"),
    (rf"DELETE /v1/(port|service-port|network|physical-network)s/{_ID}", r"\1 delete \2"),
)
_BODY: Final = r" \{[^{}]*(\{[^{}]*\})?\}"
_FIELD: Final = r'"(\w+)": \[?"?([\w-]+)"?\]?'
#: Options that are not named like their fields.
_OPTIONS: Final = {
    "enabled": "auto-lb",
    "load_threshold": "auto-lb-load",
    "improvement_threshold": "auto-lb-improvement",
}
_WORDS: Final = {
    "GET": "show",
    "PUT": "put",
    "DELETE": "delete",
    "send If-Match": "give --if-match",
    "If-Match": "--if-match",
    "ETag": "etag",
}
_WORD: Final = re.compile("|".join(rf"\b{word}\b" for word in _WORDS))


def as_commands(text: str) -> str:
    """The text with commands in place of calls."""
    if "/v1/" in text:
        for call, command in _COMMANDS:
            text = re.sub(call, f"netplugin {command}", text)
    if "netplugin " in text:
        text = re.sub(_BODY, _options, text)
    return _WORD.sub(lambda word: _WORDS[word[0]], text)


def _options(body: re.Match[str]) -> str:
    """The body of a call as options; a flag has no value, but for that of the load balance."""
    options = []
    for name, value in re.findall(_FIELD, body[0]):
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        value = {"true": "on" if name == "enabled" else ""}.get(value, value)
        options.append(f" {option} {value}".rstrip())
    return "".join(options)
