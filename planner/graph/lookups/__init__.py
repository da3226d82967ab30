"""Tables that a step only looks up by rows."""
