"""Policy versions sent from GPU to GPU: CUDA IPC and NCCL."""
