"""Chains of equal stages in a loop over microbatches, and how they are found."""
