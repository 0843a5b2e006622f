"""What a parameter is at rest: a DTensor that knows whether somebody has written to it."""

import shardwise.engine.tensor.specials  # noqa: F401 - whoever imports a tensor has its operators
