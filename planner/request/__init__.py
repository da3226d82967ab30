"""What the user requests: options, modes, pins and marks, as masks over strategies."""
