"""Sources of factor rules: Shardy, declarations of the user, and hand-written rules."""
