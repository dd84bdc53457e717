"""Training with Megatron-core: tensor, pipeline and data parallel."""
