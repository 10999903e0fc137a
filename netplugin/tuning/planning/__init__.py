"""Plan a host from its facts and an intent (pure)."""
