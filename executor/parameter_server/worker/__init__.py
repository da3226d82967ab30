"""A worker: pulls and pushes parameters, takes its share of the items."""
