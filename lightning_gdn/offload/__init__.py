"""Activation offload: storages move to pinned host memory in forward and come back in backward, one block before they are needed.

In reading order: `..offload_config` (what a user may ask for), `engine` (which storage moves when, and every wait), `copies` (the primitives the
engine needs of a device), `cuda` and `simulated` (the two devices), `pool` (pinned buffers), `budget` (how much moves), `statistics` (what it cost).
Nothing here knows a model; `budget` imports no torch.
"""
