"""Loss attribution: drop counters and CPU cost, read at each component on the path of the frames."""
