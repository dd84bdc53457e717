"""vLLM as an engine: in a child of the actor, or behind `vllm serve`."""
