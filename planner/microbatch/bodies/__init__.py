"""Equations of a microbatch whose bodies are made anew."""
