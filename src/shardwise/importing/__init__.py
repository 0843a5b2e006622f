"""`shardwise import-config`: what others' configurations mean here, no key dropped."""
