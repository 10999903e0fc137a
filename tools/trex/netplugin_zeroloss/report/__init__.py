"""Reports of a run: table, plot, HTML page, and comparison with another run."""
