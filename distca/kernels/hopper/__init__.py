"""distca's attention kernel for Hopper GPUs: task tables, launches and CUDA sources."""
