"""Compiled modules: HLO text as data, how often its loops run, the collectives in it."""
