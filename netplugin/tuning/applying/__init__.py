"""Apply a plan to the running host, journal every change, undo it."""
