"""`shardwise bench`: one model and batch, trained by one engine after another, side by side.

Reading order: engines (names), workload and user (what is trained), trainers and peers/ (how), rank
(one process), group (its processes), compare (turns and limits), rows, table, figure (results),
command. The process that drives the rest needs no torch.
"""
