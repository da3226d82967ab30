"""Where factor rules come from: Shardy, a declaration, or by hand."""
