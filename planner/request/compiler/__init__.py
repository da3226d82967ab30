"""Options for XLA: parsed, and by kind of device."""
