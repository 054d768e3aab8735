"""Our own attention kernel for Hopper GPUs: tables of tasks, launches, and the CUDA sources they compile."""
