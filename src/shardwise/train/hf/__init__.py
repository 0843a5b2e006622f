"""Models of `transformers` in the training job (`model.kind = "hf"`).

Reading order: `description` (what lies at `model.path`), `library` (transformers, when it is
needed), `attention`, `build` (the model on meta), `lora` (adapters in it), `weights` (from
safetensors into shards), `prepare` (all of that for the job), `needs` (bytes a rank), `trial` (its
first forward), `card` and `export` (a directory that others load), `generate` (what it says).
"""
