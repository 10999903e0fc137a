"""Carrying out a plan on the running host: apply, the journal, undo."""
