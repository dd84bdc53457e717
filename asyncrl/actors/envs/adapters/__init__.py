"""Environments of other packages: MCP servers, gyms, OpenEnv, NeMo Gym, verifiers."""
