"""Files of a checkpoint: Orbax folders, safetensors, checksums."""
