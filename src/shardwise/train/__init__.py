"""The training job: configuration, data, model, loop and launcher behind `shardwise train`.

Reading order: `config` and `config_file` (what to do), `corpus`, `data` and `order` (what is read),
`decoder`, `factory` and `model` (what is trained), `loop` (the job on one page), `job` and `resume`
(how it is put together), `worker` and `launch` (its processes). Importing this package imports no
torch.
"""
