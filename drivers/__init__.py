"""The backends: each a package of its own that never imports another."""
