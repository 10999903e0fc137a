"""What all backends on Open vSwitch share, against a real one with dummy devices."""
