"""The converter: any checkpoint that `jaxpage.formats` reads to our own form, or Hugging Face's.

jaxpage.formats -> leaves -> orbax_io or hf_export -> atomic_directory
"""
