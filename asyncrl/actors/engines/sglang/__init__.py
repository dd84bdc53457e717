"""SGLang as an engine, behind its server."""
