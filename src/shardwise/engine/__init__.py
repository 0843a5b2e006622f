"""The engine: parameters that are sharded at rest, whole while they are used, and gradients that
come back as shards.

    core          the kernel: one unit's parameters and gradients, and who moves them when
    tensor, mesh  what a parameter is at rest, and how it lies over the ranks
    guards        what would train wrongly without a word is named
    services      what users ask for beside training itself
    reproducible  steps whose numbers do not depend on the ranks
    api, module, settings, subclasses   what users call; parameters that bring hooks of their own
"""
