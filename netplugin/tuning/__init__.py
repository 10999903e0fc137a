"""Host tuning for packet forwarding: read the facts, plan the settings, apply and verify them."""
