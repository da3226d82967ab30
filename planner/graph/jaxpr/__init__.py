"""Jaxprs: the one walk through them, and where in the user's code an equation comes from."""
