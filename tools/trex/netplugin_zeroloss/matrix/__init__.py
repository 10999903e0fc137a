"""A run over many cells: description, journal, setup and search of each cell."""
