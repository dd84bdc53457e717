"""Training with transformers models: one process, FSDP2, LoRA, compiled layers."""
