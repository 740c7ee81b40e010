"""The engines of a served model: one or several, each monitored and restarted, and the texts that survive a crash."""
