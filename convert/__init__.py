"""The converter: from any checkpoint that `jaxpage.formats` reads to our format or Hugging Face's.

jaxpage.formats -> leaves -> orbax_io or hf_export -> atomic_directory
"""
