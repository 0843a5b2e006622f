"""The kernel: one unit's parameters and gradients move between shards and full tensors.

Reading order: `parameter`, `stages`, `bucket` (memory), `copy` (the gathered copy, who holds it),
`arrivals`, `gradients` and `reduction` (one gradient's way), `unit` (what one unit does in a step),
`moments`, `context`, `call`, `backward` (who asks it to, when). Then `build`, `upkeep` and `guests`
(what modules hold), `state`, `settings`, `weight`, `tally`.
"""
