#!/usr/bin/env python3
"""The command ``zeroloss`` from a checkout; installed, it is ``netplugin-zeroloss``."""

from __future__ import annotations

import sys
from pathlib import Path

# The checkout that this file is in comes first, so that it also runs where netplugin is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from netplugin.acceptance.cli import main

if __name__ == "__main__":
    sys.exit(main())
