"""The backend sriov: a virtual function of a NIC goes into the VM as it is."""
