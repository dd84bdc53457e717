"""The embedded engine: transformers in the actor's process, on a CPU or a GPU."""
