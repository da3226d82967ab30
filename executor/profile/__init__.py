"""Traced runs beside their plans: what ``train(profile=...)`` writes, and ``planner profile``."""
