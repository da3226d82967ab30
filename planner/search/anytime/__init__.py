"""The anytime search: bounds, neighborhoods, and an integer program on what bounds leave."""
