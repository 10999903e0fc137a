"""From facts and an intent to a plan, without touching anything."""
