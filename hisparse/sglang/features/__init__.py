"""What a server can do besides the plain way, one file or folder a feature."""
