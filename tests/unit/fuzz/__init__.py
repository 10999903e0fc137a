"""Parsers against inputs that nobody would send."""
