"""The searches, one file each; ``planner.search.registry`` names them."""
