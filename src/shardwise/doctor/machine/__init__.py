"""`shardwise doctor`: what this machine has, and what of it will be in a job's way.

Reading order: `host` (files of the kernel), `gpus` (the one place that asks the driver), `checks`
(findings), `bandwidth` (what moves how fast, on request), `hardware_file` (for `plan`).
"""
