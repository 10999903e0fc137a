"""The backend vdpa: virtio over vhost-user to the VM, a virtual function to the network, OVS between."""
