"""Everything by which a process acts on what is outside it, one step after the other, and faults at each."""
