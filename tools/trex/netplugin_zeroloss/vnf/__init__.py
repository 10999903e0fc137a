"""VNF adapters: start, check, count and stop the program that forwards the frames."""
