"""The packages as operators have them: installed, upgraded and removed in a VM with systemd."""
