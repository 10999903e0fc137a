"""A run over many cells: its description, its journal, and how each cell is set up and searched."""
