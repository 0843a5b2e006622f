"""The engines that shardwise is compared with. Each file has `make(setup) -> trainer`.

The only folder of src/ that imports torch's FSDP and other people's engines, each in a file of its
own that is loaded when that engine is measured: here they are what is measured, nothing of
shardwise is built on them (tools/project_rules.py holds that).
"""
