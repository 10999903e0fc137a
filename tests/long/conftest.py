"""These tests are in a sandbox, as the functional ones."""

from __future__ import annotations

from tests.functional.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
