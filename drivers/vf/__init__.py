"""What the backends that give VMs a virtual function share: inventory, ledger, steps. Not a backend."""
