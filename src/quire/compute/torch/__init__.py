"""The engine for GPUs, over torch: the same `DecoderSpec`, paged memory on the device. Only this folder uses torch."""
