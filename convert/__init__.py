"""The converter: any LLaMA-family checkpoint to our parameter tree, and back.

From a file to a model:

    locate -> sources (gguf_io, safetensors_io, torch_io + hf_config, gguf_config, meta_config)
           -> assemble (rules) -> leaves -> orbax_io or hf_export -> aside

`jaxpage.checkpoint` takes the leaves to the device instead.
"""
