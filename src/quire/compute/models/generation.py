"""The makers' sampling defaults: the settings in generation_config.json for choosing a token, and stop strings.

Lengths, beams and other settings of that file are left to the caller and are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.core.sampling_params import MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS, USUAL_PENALTY_WINDOW, WHOLE_TEXT


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests; a field is None if the folder lacks the setting.

    `do_sample` false means temperature 0. A `top_k` of 0 or -1 is off. Only GGUF files and Ollama's
    store have a `penalty_window`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    penalty_window: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def recommends_sampling(self) -> bool:
        """Whether the makers recommend settings for sampling."""
        return any(each is not None for each in (self.temperature, self.top_p, self.top_k, self.min_p))

    @classmethod
    def read(cls, config: ConfigFile) -> GenerationDefaults:
        """Return the defaults in the generation settings.

        >>> GenerationDefaults.read(ConfigFile("generation_config.json", {"do_sample": False, "top_k": 20}))
        GenerationDefaults(temperature=0.0, top_p=None, top_k=20, min_p=None, repetition_penalty=None, ..., stop=())
        """
        temperature = config.optional_number("temperature", low=0, high=100)
        return cls(
            temperature=temperature if config.flag("do_sample", True) else 0.0,
            top_p=config.optional_number("top_p", low=0, high=1),
            top_k=_size(config, "top_k", low=-1),
            min_p=config.optional_number("min_p", low=0, high=1),
            repetition_penalty=config.optional_number("repetition_penalty", low=0.01, high=100),
            penalty_window=_size(config, "penalty_window", low=0),
            stop=_stop(config),
        )


def penalty_of(repeat_penalty: object, repeat_last_n: object) -> dict[str, object]:
    """Return llama.cpp's and Ollama's penalty as settings of generation_config.json; the last tokens are 64 by default.

    >>> penalty_of(1.1, None), penalty_of(1.1, -1), penalty_of(1.1, 0)
    ({'repetition_penalty': 1.1, 'penalty_window': 64}, {'repetition_penalty': 1.1, 'penalty_window': 0}, {})
    """
    if repeat_penalty is None or repeat_last_n == 0:
        return {}
    window = USUAL_PENALTY_WINDOW if repeat_last_n is None else 0 if repeat_last_n == WHOLE_TEXT else repeat_last_n
    return {"repetition_penalty": repeat_penalty, "penalty_window": window}


def _size(config: ConfigFile, name: str, low: int) -> int | None:
    return config.size(name, low=low, high=MAX_LENGTH) if config.is_set(name) else None


def _stop(config: ConfigFile) -> tuple[str, ...]:
    """Return the stop strings, from one string or a list; a text ends before the first match."""
    given = config.fields.get("stop_strings")
    stop = (given,) if isinstance(given, str) else config.texts("stop_strings") if given is not None else ()
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(text) <= MAX_STOP_STRING_LENGTH for text in stop):
        raise config.error(
            "stop_strings", f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_STRING_LENGTH} characters"
        )
    return stop
