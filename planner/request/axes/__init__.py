"""What a mesh axis is asked to be used for, as masks of strategies."""
