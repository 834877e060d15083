"""A LLaMA small enough for the repository, trained until its text is visibly not noise."""
