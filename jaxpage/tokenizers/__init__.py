"""The kinds of tokenizer, one file each; `jaxpage.tokenizer` is the door to them."""
