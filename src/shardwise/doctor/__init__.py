"""`shardwise verify` and `shardwise doctor`.

`verify`: is this model trained alike on one rank, on several, and after a resume?

Reading order: `plan` (the shrunk configuration, what is run), `difference` (what counts as equal),
`baseline` (plain PyTorch, without the engine), `rank` and `group` (the processes), `ladder` (the
rungs), `table` and `command`. `doctor`: `finding`, `run` (a run directory), `machine` and `examine`
(the command line). Importing this package imports no torch.
"""
