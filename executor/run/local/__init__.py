"""What the executor runs on shards itself, with all mesh axes manual."""
