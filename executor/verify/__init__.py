"""Compares a plan with the unsharded run, with Shardy, and with what compilers make of it."""
