"""Tests on Debian's 6.12 kernel: in a guest without KVM that is the hypervisor under test.

    python -m pytest -p no:cacheprovider -p tests.nested.plugin -m nested tests/functional/test_x.py

runs the tests with the marker `nested` in such a guest and reports them as if they ran here. They
have what the machine's own kernel may lack: VLAN-aware bridges, bonds, tc with police, vhost_net,
and an emulated Intel 82576 (`igb`) with virtual functions behind an emulated IOMMU. The parts:

- `prepare` fetches QEMU 10 and the kernel into `.lab/`
- `plugin` is pytest's side on the outside: which test in which guest, and its reports
- `machine` is the guest as seen from the outside: QEMU, its devices and its channel
- `init` is process 1 of the guest: it mounts what there is to mount and runs the inner pytest
- `reporter` is pytest's side in the guest: it sends each report over the channel
- `nics` is for the tests: the NICs of the guest, by what they are for
"""
