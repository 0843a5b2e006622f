"""Collectives that spend arithmetic for bandwidth: formats in which elements travel, and ways that
they take, over any transport that moves bytes.

Reading order: `format` -> `steps` -> `gather`, `reduce`, `all_reduce`.
"""
