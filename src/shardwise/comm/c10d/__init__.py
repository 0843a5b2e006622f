"""The transport over process groups."""
