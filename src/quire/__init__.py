"""quire serves large language models from paged KV memory."""

__version__ = "0.1.0"
