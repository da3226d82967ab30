"""Which server holds which part of which array."""
