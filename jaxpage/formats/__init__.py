"""Checkpoints on disk: Hugging Face, GGUF, Meta and our own, as one thing to read.

From a file to a model:

    locate -> sources (gguf_io, safetensors_io, torch_io + hf_config, gguf_config, meta_config)
           -> assemble (rules) -> leaves
    locate -> converted (orbax_io) -> leaves

`jaxpage.checkpoint` takes the leaves to the device, `convert` to a new directory. A format
that is written too (ours, Hugging Face's) is written by the file that reads it. Nothing here knows
a device, or where a new model is put.
"""
