"""Networks and physical networks, on models of their backends."""
