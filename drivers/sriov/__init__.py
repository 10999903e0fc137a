"""The backend sriov: a virtual function of a NIC is passed through to the VM."""
