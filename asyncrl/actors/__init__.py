"""Generate: engines, environments, the episode loop, the actor process."""
