"""How fast is it, beside what, and where does the time go?"""
