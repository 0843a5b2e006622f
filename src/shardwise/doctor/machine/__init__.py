"""`shardwise doctor`: what this machine has, and what of it will be in a job's way."""
