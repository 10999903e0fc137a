"""The backend linuxbridge: one persistent tap per NIC, one bridge per segment, nftables filters."""
