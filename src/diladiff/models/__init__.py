"""Networks, one file each."""
