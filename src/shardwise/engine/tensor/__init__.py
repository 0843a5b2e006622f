"""What a parameter is at rest: a DTensor that knows whether somebody has written to it."""
