"""`quire generate`: prompts in, texts on stdout, everything else on stderr. A single text is shown as it grows."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.sampling_options import add_sampling_options, check_sampling, require_text, sampling_params
from quire.cli.session import chosen_adapter, describe, in_utf8, load, remark, stderr_terminal, stream_text
from quire.cli.terminal import add_color_option
from quire.core.errors import ExecutionError, InvalidRequestError
from quire.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.engine.text.prompts import Prompt

EARLY_STOPPING: Final[dict[str, bool | Literal["never"]]] = {"yes": True, "no": False, "never": "never"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `generate`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "generate", help="continue a prompt", description="Continue prompts, or answer them."
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", "-p", metavar="TEXT", action="append", help="the prompt; repeat it to run several prompts at once"
    )
    source.add_argument(
        "--prompt-file", metavar="FILE", help="file with the prompt; -: stdin, which is also the default"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="treat the prompt as a chat message (default if the model has a chat template)",
    )
    form.add_argument("--raw", dest="chat", action="store_false", help="treat the prompt as text to continue")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="how many texts to generate (default: 1)")
    _add_search_options(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON per prompt at the end")
    parser.add_argument("--quiet", "-q", action="store_true", help="print only the text and errors")
    add_sampling_options(parser)
    add_engine_options(parser)
    add_color_option(parser)
    parser.set_defaults(run=run)


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--best-of", type=int, metavar="N", help="generate N texts and keep the likeliest")
    several.add_argument("--beams", type=int, metavar="N", help="beam search with N beams")
    parser.add_argument(
        "--length-penalty", type=float, metavar="X", help="beam search: above 0, longer texts rank higher; 0: off"
    )
    parser.add_argument(
        "--early-stopping",
        choices=EARLY_STOPPING,
        help="end a beam search when enough texts have ended (yes), when a better one is unlikely (no, the default) or "
        "impossible (never)",
    )


def _searching(arguments: argparse.Namespace, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters with the requested number of texts. Does not mutate."""
    for flag, value in (("--best-of", arguments.best_of), ("--beams", arguments.beams)):
        if value is not None and value < arguments.n:
            raise InvalidRequestError(flag, value, f"at least {arguments.n}, the number of texts (-n)")
    sampling = replace(sampling, n=arguments.n, best_of=arguments.best_of)
    if arguments.beams is not None:
        given = vars(arguments)  # the model's recommended values are for sampling
        sampling = replace(
            sampling,
            best_of=arguments.beams,
            beam_search=True,
            temperature=given.get("temperature", 0.0),
            repetition_penalty=given.get("repetition_penalty", 1.0),
        )
    if arguments.length_penalty is not None:
        sampling = replace(sampling, length_penalty=arguments.length_penalty)
    if arguments.early_stopping is not None:
        sampling = replace(sampling, early_stopping=EARLY_STOPPING[arguments.early_stopping])
    return sampling


def run(arguments: argparse.Namespace) -> int:
    """Generate. Returns the exit status."""
    try:
        return _run(arguments)
    except InvalidRequestError as error:
        if arguments.beams is None or error.field != "best_of":
            raise
        raise InvalidRequestError("--beams", error.value, error.allowed) from None


def _run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments, os.environ)
    check_sampling(_searching(arguments, sampling_params(arguments, SamplingParams())))
    texts = arguments.prompt or [_read_prompt(arguments)]
    for text in texts:
        require_text(text)
    terminal = stderr_terminal(arguments.color)
    with load(config, None if arguments.quiet else terminal) as llm:
        if not arguments.quiet:
            remark(str(llm.report), terminal)
        sampling = _searching(arguments, sampling_params(arguments, llm.get_default_sampling_params()))
        prompts = [_as_prompt(llm, text, arguments.chat) for text in texts]
        outputs = _generate(llm, prompts, sampling, arguments)
        if not arguments.quiet:
            for output in outputs:
                remark(describe(output, sampling.max_tokens), terminal)
    for output in outputs:
        if output.error:
            raise ExecutionError(output.error)
    return 0


def _read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file not in (None, "-"):
        return in_utf8(partial(Path(arguments.prompt_file).read_text, encoding="utf-8"), arguments.prompt_file)
    if sys.stdin.isatty():
        print("Prompt, ended by Ctrl-D:", file=sys.stderr)
    return in_utf8(sys.stdin.read).removesuffix("\n")


def _as_prompt(llm: LLM, text: str, chat: bool | None) -> Prompt:
    takes_messages = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if not (takes_messages if chat is None else chat):
        return text
    return [{"role": "user", "content": text}]


def _generate(
    llm: LLM, prompts: list[Prompt], sampling: SamplingParams, arguments: argparse.Namespace
) -> list[RequestOutput]:
    if len(prompts) * sampling.num_sequences == 1 and not arguments.json:
        return [_stream(llm, prompts[0], sampling)]
    show_progress = not (arguments.json or arguments.quiet)
    outputs = llm.generate(prompts, sampling, use_tqdm=show_progress, adapter=chosen_adapter(llm))
    for index, output in enumerate(outputs):
        if arguments.json:
            print(json.dumps(_plain(output), ensure_ascii=False))
            continue
        if len(prompts) > 1:
            print(f"=== prompt {index + 1} of {len(prompts)}")
        for each in output.outputs:
            print(f"--- {each.index + 1} of {sampling.n}{_score(each)}\n{each.text}" if sampling.n > 1 else each.text)
    return outputs


def _score(output: CompletionOutput) -> str:
    return "" if output.score is None else f", score {output.score:.4f}"


def _stream(llm: LLM, prompt: Prompt, sampling: SamplingParams) -> RequestOutput:
    write = partial(print, end="", flush=True)
    with closing(llm.stream([prompt], sampling, adapter=chosen_adapter(llm))) as snapshots:
        output = stream_text(snapshots, write)
    if output is None:
        raise ExecutionError("the engine returned nothing")
    if not output.outputs[0].text.endswith("\n"):
        write("\n")
    return output


def _plain(output: RequestOutput) -> dict[str, Any]:
    plain = asdict(output)
    plain["metrics"] |= {
        "time_to_first_token_s": output.metrics.time_to_first_token_s,
        "tokens_per_s": output.metrics.tokens_per_s,
    }
    return plain
