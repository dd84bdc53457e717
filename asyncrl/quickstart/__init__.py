"""The tiny model of the quickstart: a real architecture with its own tokenizer.

Its weights (2 MB) are part of the package; `scripts/make_quickstart_model.py` makes them again in about a minute.
"""
