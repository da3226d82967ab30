"""What a plan decides: groups of values and their legal strategies. Knows no request."""
