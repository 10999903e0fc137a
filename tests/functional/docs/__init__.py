"""The commands of the documentation, carried out in a sandbox."""
