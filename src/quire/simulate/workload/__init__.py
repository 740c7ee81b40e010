"""The requests for a simulated engine and their times: drawn from distributions, or read from traces."""
