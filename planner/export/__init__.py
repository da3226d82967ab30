"""A plan in the forms that other projects read: specs by argument, logical axis rules."""
