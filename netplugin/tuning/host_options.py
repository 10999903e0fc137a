"""Configuration group ``[host]``: the fields of ``Intent`` as oslo.config options."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from netplugin.tuning.intent import Intent

GROUP = "host"

_LIBVIRT_URI = cfg.StrOpt(
    "libvirt_uri",
    default="qemu:///system",
    help="The libvirt of this host, queried for versions and for the CPU pinning of running domains.",
)


def _option(name: str, field: FieldInfo) -> Any:
    """Make an option of a field of ``Intent``. It does not validate; ``Intent`` does, naming the field."""
    words: dict[str, Any] = {
        "help": f"{str(field.description)[:1].upper()}{str(field.description)[1:]}."
    }
    default = None if field.is_required() else field.default
    if isinstance(default, bool):
        return cfg.BoolOpt(name, default=default, **words)
    if isinstance(default, tuple):
        return cfg.ListOpt(name, default=[str(each) for each in default], **words)
    if field.annotation is float:
        return cfg.FloatOpt(name, default=default, **words)
    return cfg.IntOpt(name, default=default, **words)


OPTIONS = [_LIBVIRT_URI, *(_option(name, field) for name, field in Intent.model_fields.items())]


def given(conf: Any) -> dict[str, Any]:
    """Intent fields set in ``[host]``; the caller may override them."""
    values = {name: getattr(conf[GROUP], name) for name in Intent.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def intent_of(conf: Any) -> Intent | None:
    """The intent of ``[host]``, or None if ``pmd_cores`` is not set. Raises: ValueError naming the option."""
    values = given(conf)
    if "pmd_cores" not in values:
        return None
    try:
        return Intent.model_validate(values)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        raise ValueError(f"[{GROUP}] {first['loc'][0]}: {first['msg']}") from None
