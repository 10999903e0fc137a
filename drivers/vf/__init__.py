"""SR-IOV code shared by the backends that use VFs: inventory, allocation, changes. Not a backend."""
