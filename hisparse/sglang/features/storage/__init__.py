"""What the linker (``linker.py``) does between the KV pool and a store."""
