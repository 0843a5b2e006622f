"""Roles of mesh dims, and how a parameter lies over them."""
