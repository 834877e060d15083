"""The shipped model families, one file each; `jaxpage.models.registry` lists them.

To add one, copy the file of the most similar one and add a row to `FAMILIES` there.
"""
