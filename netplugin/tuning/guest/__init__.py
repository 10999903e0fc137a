"""The guest's side: what Linux in a VM should be set to, by the domain that the VM runs as (pure)."""
