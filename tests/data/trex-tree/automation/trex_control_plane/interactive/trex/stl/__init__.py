"""A stand-in for TRex's package, for tests."""
