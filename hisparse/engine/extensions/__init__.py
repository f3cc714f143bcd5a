"""What a decode step may do besides selecting and attending: one file each."""
