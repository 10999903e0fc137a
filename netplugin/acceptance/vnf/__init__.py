"""What runs in the VM and forwards: how it is attached, started, checked, counted and stopped."""
