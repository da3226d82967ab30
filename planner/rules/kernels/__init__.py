"""What users write for themselves: kernels, FFI calls, ``shard_map`` regions."""
