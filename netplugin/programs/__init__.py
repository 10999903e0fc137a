"""Programs that measurements start, on this machine or through SSH, and what they print."""
