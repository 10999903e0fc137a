#!/usr/bin/env python3
"""Runs ``netplugin-zeroloss`` from a checkout, without an installation."""

from __future__ import annotations

import sys
from pathlib import Path

# Prefer this checkout, so that the script also runs without an installed netplugin.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[0]))

try:
    from netplugin_zeroloss.cli.main import main
except ModuleNotFoundError as error:
    if str(error.name).startswith("netplugin"):
        raise
    print(
        f"netplugin-zeroloss: the Python package {error.name} is missing: in a checkout, and in its"
        " virtualenv, pip install . ./tools/trex",
        file=sys.stderr,
    )
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
