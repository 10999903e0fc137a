"""Guest tuning: settings for Linux in a VM, derived from its libvirt domain (pure)."""
