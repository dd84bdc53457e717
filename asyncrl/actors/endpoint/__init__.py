"""The OpenAI-compatible endpoint through which any agent plays episodes."""
