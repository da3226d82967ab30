"""A parameter server: values, optimizer state, clocks, members, snapshots."""
