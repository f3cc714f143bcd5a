"""Optional features of a decode step, one file each."""
