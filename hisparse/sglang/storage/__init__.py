"""What :class:`hisparse.sglang.linker.HiSparseLinker` does between the KV pool and a store."""
