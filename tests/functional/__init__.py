"""Tests on real daemons, in a sandbox."""
