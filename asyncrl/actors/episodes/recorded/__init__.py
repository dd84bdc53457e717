"""Durable turns on the actor: what an episode records in the buffer, and how one that was interrupted goes on."""
