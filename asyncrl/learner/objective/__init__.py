"""What a training step minimises, put together from the config's choices."""
