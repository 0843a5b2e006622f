"""Checkpoints that can be trusted: complete or absent, verified as they are read, never unpickled.

Reading order: `files` (blocks with checksums), `store` (directories), `index` (what lies where),
`state`, `plan`, `writing`; `source`, `loading`; `manager` (a run's checkpoints); `importing` and
what it names (other formats), `exporting`, `pretrained`.
"""
