"""Whether a trial tells anything, and what several answers say together."""
