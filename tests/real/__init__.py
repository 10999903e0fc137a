"""Tests with trees of TRex and VPP, which are built outside of this project (tox -e real)."""
