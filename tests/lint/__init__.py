"""Programs of the lint environment that no index has."""
