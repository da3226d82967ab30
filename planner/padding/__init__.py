"""A batch that devices do not divide: padded with examples that no sum has."""
