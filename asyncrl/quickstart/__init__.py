"""The tiny model of the quickstart: a real architecture, its own tokenizer, made here in under a minute."""
