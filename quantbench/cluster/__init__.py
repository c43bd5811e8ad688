"""One sweep over many devices: points shared by the devices, slow devices found, and runs merged."""
