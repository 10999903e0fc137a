"""Where frames were lost and what the trial cost, read at each place on the way."""
