"""`shardwise doctor RUN`: what a run directory shows of what went wrong.

Reading order: `case` (what is read, and what it says at first sight), then the checks, each a
function of a case: `ending`, `learning`, `samples`, `memory`, `time`, `settings`, `warned`;
`checks` lists them all.
"""
