"""The engines of a served model: one or several, each watched and restarted, and the texts that survive them."""
