"""How good the search is: other searches on simulated devices with known answers."""
