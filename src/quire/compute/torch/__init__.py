"""The engine for GPUs, over torch: the same `DecoderSpec`, paged memory on the device. Alone in importing torch."""
