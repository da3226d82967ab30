"""The Plan as data: extraction, schema, differences, the roles of mesh axes."""
