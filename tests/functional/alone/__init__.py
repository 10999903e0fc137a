"""Tests that measure the machine or change what all share, so that nothing may run next to them."""
