"""Is it right: the same tokens, whole books, no crash, whatever is done to it?"""
