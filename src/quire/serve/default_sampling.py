"""Sampling parameters that a server sets for requests without them: `--default-sampling temperature=0.7,top_p=0.95`."""

from __future__ import annotations

from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.parameters import Integer
from quire.core.sampling_params import DRAW_PARAMETERS, PARAMETERS, SamplingParams
from quire.core.validate import ANY_ENGINE, validate_sampling

FORM: Final = f"NAME=NUMBER, with commas between several; names: {', '.join(DRAW_PARAMETERS)}"


def read_defaults(text: object) -> dict[str, float]:
    """Return the parameters in a text by name; raises ValueError, which says what is allowed.

    >>> read_defaults("temperature=0.7, top-k=20")
    {'temperature': 0.7, 'top_k': 20}
    """
    defaults: dict[str, float] = {}
    for part in str(text).split(","):
        name, _, number = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in DRAW_PARAMETERS or name in defaults:
            raise ValueError(FORM)
        try:
            defaults[name] = int(number) if isinstance(PARAMETERS[name].kind, Integer) else float(number)
        except ValueError:
            raise ValueError(FORM) from None
    try:
        validate_sampling(SamplingParams(**defaults), ANY_ENGINE)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        raise ValueError(f"{error.allowed} for {error.field}") from None
    return defaults
