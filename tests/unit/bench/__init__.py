"""The benchmark: what it says of samples, goals and differences; nothing is measured."""
