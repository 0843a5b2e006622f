"""Models of `transformers` in the training job (`model.kind = "hf"`).

Reading order: `description` (what lies at `model.path`), `library` (transformers, when it is
needed), `attention`, `build` (the model on meta), `weights` (from safetensors into shards),
`needs` (bytes a rank), `export` and `card` (a directory that transformers loads).
"""
