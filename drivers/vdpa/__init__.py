"""The backend vdpa (software vDPA): OVS relays between the VM's vhost-user port and a VF."""
