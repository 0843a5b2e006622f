"""Semi-synchronous replicas (DiLoCo): jobs that meet every so many steps.

    replica A, a job of its own   --a stream for each rank-->   coordinator: theta, momentum, round
    replica B, a job of its own   --a stream for each rank-->

Each replica trains alone for `steps` steps from the same weights theta, then sends how far it went;
the coordinator takes one step of SGD with Nesterov momentum along the mean of these differences,
and sends the new theta to all. Reading order: `frames` (bytes on a stream), `rounds` (who is in
which round), `parts` (tensors as bytes), `outer` (theta and its file), `coordinator`,
`member` (the side of a rank).

Source: DiLoCo (Douillard et al. 2023, arXiv 2311.08105).
"""
