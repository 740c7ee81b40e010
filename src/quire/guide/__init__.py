"""The guide: a very small model that ships with quire, so that there is one to talk to without a download.

It is a Qwen3 of about 2.8 million parameters in bfloat16, with a tokenizer and a chat template of its own, in the
files of any Hugging Face folder: whatever reads such a folder reads this one. It answers questions about paged memory
and about quire, and little else. `scripts/guide/` in the repository has its corpus, the script that trains it, and its
score.

>>> sorted(file.name for file in GUIDE_FOLDER.iterdir() if file.name.startswith("model"))
['model.safetensors']
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

GUIDE_FOLDER: Final = Path(__file__).parent
