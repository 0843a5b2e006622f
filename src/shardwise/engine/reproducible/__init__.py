"""Steps whose numbers do not depend on the number of ranks."""
