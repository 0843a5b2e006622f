"""How far random searches go: SHARDWISE_EXAMPLES=N makes N times as many examples of each, other
ones on each run. Without it the examples are the same on each run, so that a run tells of the
change that is tested and not of luck."""

import os

TIMES = max(1, int(os.environ.get("SHARDWISE_EXAMPLES", "1")))
IS_RANDOM = "SHARDWISE_EXAMPLES" in os.environ
