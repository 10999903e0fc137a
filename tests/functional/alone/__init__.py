"""Tests that measure the machine or change what all share, so that nothing may run beside them."""
