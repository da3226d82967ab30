"""Chooses the mesh: candidates with bounds, searched together. The room that names searches."""
