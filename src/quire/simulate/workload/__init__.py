"""What is asked of a simulated engine, and when: drawn from distributions, or read from traces."""
