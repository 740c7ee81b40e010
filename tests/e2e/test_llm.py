"""LLM from end to end, on tiny models with a tokenizer: outputs, sharing, failures of one request, bad input."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.compute import backend
from quire.core.errors import (
    CheckpointError,
    ExecutionError,
    InvalidConfigError,
    InvalidRequestError,
    InvalidValueError,
    RequestTooLargeError,
)
from quire.engine import factory
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.detokenizer import IncrementalDetokenizer
from support.guesses import Guesser, verify_all_guesses
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

VOCAB_SIZE = 384
SETTINGS = {"vocab_size": VOCAB_SIZE, "eos_token_id": VOCAB_SIZE - 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SYSTEM = [(7 * i) % 120 for i in range(40)]
BACKENDS = ("reference", "native")


def write_model(folder: Path, **settings: Any) -> Path:
    write_tiny_qwen3(folder, settings=SETTINGS | settings)
    return write_chatml(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **({"kv_memory": "1MiB", "num_threads": 1} | settings))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with make(folder) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An engine that nobody may leave in disorder."""
    yield shared
    assert_clean(shared)


def assert_clean(llm: LLM) -> None:
    llm.engine.scheduler.check()
    assert not llm.engine.scheduler.requests
    assert llm.engine.scheduler.memory.pool.num_in_use == 0


def tokens(llm: LLM, prompts: Any, sampling: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]


# ---- what comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_come_in_the_order_of_the_prompts_and_are_those_of_each_alone(folder: Path, backend: str) -> None:
    prompts = [SYSTEM, "hello", {"prompt_token_ids": [5, 6]}, {"prompt": "the end"}, SYSTEM[:20]]
    with make(folder, backend=backend) as llm:
        together = llm.generate(prompts, [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 3, 7, 5, 1)])
        assert [len(output.outputs[0].token_ids) for output in together] == [9, 3, 7, 5, 1]
        assert [output.prompt for output in together] == [None, "hello", None, "the end", None]
        assert [output.request_id for output in together] == ["0", "1", "2", "3", "4"]
        llm.reset_prefix_cache()
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=9))
            assert alone.outputs[0].token_ids[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
            assert output.finished and output.outputs[0].finish_reason == "length"
        assert_clean(llm)


def test_text_is_the_text_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert llm.tokenizer is not None
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    assert output.prompt_token_ids == llm.tokenizer.encode("hello")


def test_streamed_text_grows_to_the_final_text(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY)
    snapshots = list(llm.stream("hello", GREEDY))
    texts = [snapshot.outputs[0].text for snapshot in snapshots]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(snapshots) == 12
    assert [snapshot.finished for snapshot in snapshots] == [False] * 11 + [True]
    assert snapshots[-1].outputs == whole.outputs


def test_two_streams_at_once_each_get_their_own(llm: LLM) -> None:
    first, second = llm.stream(SYSTEM, GREEDY), llm.stream([9, 8], GREEDY)
    next(first)
    ends = [list(second)[-1], list(first)[-1]]
    assert [end.outputs[0].token_ids for end in ends] == tokens(llm, [[9, 8], SYSTEM])


def test_leaving_a_stream_ends_the_request(llm: LLM) -> None:
    stream = llm.stream(SYSTEM, SamplingParams(temperature=0.0, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.requests
    stream.close()
    assert_clean(llm)


def test_a_conversation_is_the_prompt_that_the_template_makes_of_it(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode_chat(messages)
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids
    assert [each.outputs[0].token_ids for each in llm.chat([messages, messages[1:]], GREEDY)] == tokens(
        llm, [ids, llm.tokenizer.encode_chat(messages[1:])]
    )
    assert llm.generate(messages, GREEDY)[0].outputs == output.outputs
    assert llm.chat(messages, temperature=0, max_tokens=12, use_tqdm=False)[0].outputs == output.outputs
    bare = llm.tokenizer.encode_chat(messages, ChatOptions(add_generation_prompt=False))
    assert llm.chat(messages, GREEDY, add_generation_prompt=False)[0].prompt_token_ids == bare != ids


def test_an_answer_that_has_begun_is_continued(llm: LLM) -> None:
    assert llm.tokenizer is not None
    messages = [{"role": "user", "content": "hello"}]
    asked = llm.tokenizer.encode_chat(messages)
    messages.append({"role": "assistant", "content": "the "})
    (rest,) = llm.chat(messages, GREEDY, continue_final_message=True, use_tqdm=False)
    assert rest.prompt_token_ids == [*asked, *llm.tokenizer.encode("the ")]
    (again,) = llm.generate([rest.prompt_token_ids], GREEDY, use_tqdm=False)
    assert rest.outputs == again.outputs


def test_a_stop_string_ends_the_text_within_the_step(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY)
    text = whole.outputs[0].text
    stop = text[4:6]
    (output,) = llm.generate("hello", GREEDY, stop=stop)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.outputs[0].token_ids) < len(whole.outputs[0].token_ids)


def test_stop_tokens_and_end_of_text(llm: LLM) -> None:
    (ids,) = tokens(llm, [SYSTEM])
    (output,) = llm.generate([SYSTEM], GREEDY, stop_token_ids=[ids[2]])
    ended = output.outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (ids[: ids.index(ids[2]) + 1], "stop", ids[2])


def test_without_max_tokens_a_text_grows_as_far_as_it_fits(folder: Path) -> None:
    with make(folder, max_model_len=100) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 97
        assert output.outputs[0].finish_reason == "length"


# ---- chance -------------------------------------------------------------------------------------------------------


def test_the_same_calls_give_the_same_outputs_and_another_seed_others(folder: Path) -> None:
    runs = []
    for seed in (3, 3, 4):
        with make(folder, seed=seed) as llm:
            runs.append([tokens(llm, [[1, 2]] * 3, SamplingParams(max_tokens=8)) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len({tuple(ids) for call in runs[0] for ids in call}) == 6


def test_n_sequences_are_those_of_n_seeds(llm: LLM) -> None:
    (output,) = llm.generate([SYSTEM], SamplingParams(max_tokens=8, n=3, seed=11))
    alone = [tokens(llm, [SYSTEM], SamplingParams(max_tokens=8, seed=11 + i))[0] for i in range(3)]
    assert [each.token_ids for each in output.outputs] == alone
    assert [each.index for each in output.outputs] == [0, 1, 2]


def test_best_of_returns_the_most_likely(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=6, n=4, seed=5, logprobs=1, ignore_eos=True)
    (every,) = llm.generate([SYSTEM], sampling)
    assert all(len(each.logprobs or []) == 6 for each in every.outputs)
    (best,) = llm.generate([SYSTEM], sampling, n=2, best_of=4)
    likeliest = sorted(every.outputs, key=lambda each: -(each.cumulative_logprob or 0.0))[:2]
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in likeliest]
    (plain,) = llm.generate([SYSTEM], sampling, n=1, best_of=4, logprobs=None)
    assert (plain.outputs[0].token_ids, plain.outputs[0].logprobs) == (likeliest[0].token_ids, None)


def test_logprobs_rank_the_token_among_all(llm: LLM) -> None:
    (output,) = llm.generate([SYSTEM], GREEDY, logprobs=3)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1
        assert [each.rank for each in entry.values()] == [1, 2, 3]
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)  # type: ignore[union-attr]
    total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_defaults_are_those_of_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    file = folder / "generation_config.json"
    settings = {"temperature": 0.6, "top_k": 20, "do_sample": True, "repetition_penalty": 1.1}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with make(folder) as llm:
        expected = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
        assert llm.get_default_sampling_params() == expected
        assert llm.generate([[1]], max_tokens=2)[0].finished


# ---- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_penalties_keep_a_text_from_repeating_itself(folder: Path, backend: str) -> None:
    with make(folder, backend=backend) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        ((plain,), (penalized,)) = (
            tokens(llm, [SYSTEM], sampling),
            tokens(llm, [SYSTEM], replace(sampling, presence_penalty=2.0, frequency_penalty=2.0)),
        )
        assert len(set(plain)) < len(set(penalized))
        (never,) = tokens(llm, [SYSTEM], replace(sampling, repetition_penalty=100.0))
        assert len(set(never)) == 40 and not set(never) & set(SYSTEM)
        assert_clean(llm)


def test_a_bias_and_a_list_of_allowed_tokens_decide_what_is_written(llm: LLM) -> None:
    assert tokens(llm, [SYSTEM], replace(GREEDY, logit_bias={77: 100})) == [[77] * 12]
    (written,) = tokens(llm, [SYSTEM], SamplingParams(max_tokens=30, temperature=5.0, allowed_token_ids=(5, 6, 7)))
    assert set(written) == {5, 6, 7}


def test_bad_words_are_not_written(llm: LLM) -> None:
    assert llm.tokenizer is not None
    letters = [llm.tokenizer.encode(letter)[0] for letter in "xyz "]
    sampling = SamplingParams(max_tokens=60, temperature=20.0, seed=2, allowed_token_ids=tuple(letters))
    words = ["xz", "yx", "yy"]
    (plain,), (clean,) = llm.generate("hello", sampling), llm.generate("hello", sampling, bad_words=words)
    assert all(word in plain.outputs[0].text for word in words)
    assert not any(word in clean.outputs[0].text for word in words)
    (whole,) = llm.generate("hello", GREEDY)
    ids = whole.outputs[0].token_ids
    (output,) = llm.generate("hello", GREEDY, bad_words_ids=[ids[3:5]])
    assert output.outputs[0].token_ids[:4] == ids[:4]
    assert output.outputs[0].token_ids[4] != ids[4]
    with make(Path(llm.config.model), skip_tokenizer_init=True) as mute:
        with pytest.raises(
            InvalidRequestError, match=r"bad_words is .* this engine has no tokenizer; use bad_words_ids"
        ):
            mute.generate([[1]], GREEDY, bad_words="x")
        assert tokens(mute, [[1]], replace(GREEDY, bad_words_ids=((5,),)))


def test_a_step_that_has_drafts_draws_by_the_same_rules(folder: Path) -> None:
    sampling = SamplingParams(
        max_tokens=30, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, bad_words_ids=((1, 2), (3,)), min_tokens=9
    )
    with make(folder) as llm:
        (expected,) = tokens(llm, [SYSTEM], sampling)
    with make(folder, speculation="ngram") as llm:
        guesser = Guesser({tuple(SYSTEM): expected}, wrong_each=3, wrong=lambda token: (token + 1) % VOCAB_SIZE)
        llm.engine._executor._proposer = guesser
        verify_all_guesses(llm)
        assert tokens(llm, [SYSTEM], sampling) == [expected]
        assert guesser.num_guesses > 20
        assert_clean(llm)


# ---- log-probabilities of the prompt ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_logprobs_are_those_of_texts_that_end_there(folder: Path, backend: str) -> None:
    with make(folder, backend=backend) as llm:
        (output,) = llm.generate([SYSTEM], GREEDY, prompt_logprobs=2)
        found = output.prompt_logprobs
        assert found is not None and found[0] is None and len(found) == len(SYSTEM)
        prefixes = [{"prompt_token_ids": SYSTEM[:count]} for count in range(1, len(SYSTEM))]
        outputs = llm.generate(prefixes, GREEDY, max_tokens=1, logprobs=2)
        for token, entry, prefix in zip(SYSTEM[1:], found[1:], outputs, strict=True):
            assert entry is not None and prefix.outputs[0].logprobs is not None
            (drawn,) = prefix.outputs[0].logprobs
            assert {other: one for other, one in entry.items() if one.rank <= 2} == drawn
            assert next(iter(entry)) == token
        assert output.outputs[0].token_ids == tokens(llm, [SYSTEM])[0]
        assert llm.generate([SYSTEM], GREEDY)[0].prompt_logprobs is None
        assert llm.generate([[7]], GREEDY, prompt_logprobs=5)[0].prompt_logprobs == [None]
        assert_clean(llm)


def test_prompt_logprobs_are_the_same_in_chunks_with_hits_and_beside_others(folder: Path) -> None:
    prompts = [SYSTEM, SYSTEM + [3] * 20, list(range(100, 300))]
    with make(folder) as llm:
        expected = [llm.generate([prompt], GREEDY, prompt_logprobs=3)[0].prompt_logprobs for prompt in prompts]
        again = llm.generate(prompts, GREEDY, prompt_logprobs=3, n=2, temperature=1.0)  # everything is cached now
        assert [output.prompt_logprobs for output in again] == expected
        assert [output.num_cached_tokens for output in again] == [0, 0, 0]
        assert llm.generate([SYSTEM], GREEDY)[0].num_cached_tokens == 32
        assert_clean(llm)
    with make(folder, max_num_batched_tokens=7, max_num_seqs=3) as llm:
        together = llm.generate([*prompts, [1, 2]], GREEDY, prompt_logprobs=3)
        assert [output.prompt_logprobs for output in together][:3] == expected


def test_prompt_logprobs_come_with_the_first_token_and_stay(llm: LLM) -> None:
    snapshots = list(llm.stream(SYSTEM, GREEDY, prompt_logprobs=0))
    assert len(snapshots) == 12
    first = snapshots[0].prompt_logprobs
    assert first is not None and len(first) == 40
    assert all(snapshot.prompt_logprobs == first for snapshot in snapshots)


# ---- sharing ------------------------------------------------------------------------------------------------------


def test_cached_tokens_are_counted_exactly(folder: Path) -> None:
    with make(folder) as llm:
        assert [llm.generate([SYSTEM], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 32]
        assert llm.generate([SYSTEM + [3] * 20], GREEDY)[0].num_cached_tokens == 32
        assert llm.generate([SYSTEM[:32]], GREEDY)[0].num_cached_tokens == 31  # one token is always computed
        llm.reset_prefix_cache()
        assert llm.generate([SYSTEM], GREEDY)[0].num_cached_tokens == 0
    with make(folder, enable_prefix_caching=False) as llm:
        assert [llm.generate([SYSTEM], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


# ---- one request fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_whose_logits_are_not_finite_ends_alone(tmp_path: Path, backend: str) -> None:
    folder, poison = write_model(tmp_path, tie_word_embeddings=False), 300
    weights = tiny_qwen3_tensors(tiny_qwen3_config(tie=False) | SETTINGS, 0)
    weights["model.embed_tokens.weight"][poison] = np.nan
    write_model_weights(folder, weights)
    bad, good = [*SYSTEM, poison, 1, 2], [[1, 2, 3], SYSTEM]
    with make(folder, backend=backend) as llm:
        expected = tokens(llm, good)
        llm.reset_prefix_cache()
        first, failed, last = llm.generate([good[0], bad, good[1]], GREEDY)
        assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == expected
        assert failed.outputs[0].finish_reason == "error"
        assert "finite" in failed.error
        llm.reset_prefix_cache()
        (alone,) = llm.generate([bad], GREEDY, n=2)
        assert [each.finish_reason for each in alone.outputs] == ["error", "error"]
        assert llm.generate([bad[:40]], GREEDY)[0].num_cached_tokens == 0  # it has left nothing behind
        assert_clean(llm)


def test_a_request_whose_text_cannot_be_decoded_ends_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = [*SYSTEM, 77, 3, 9], [[1, 2, 3], SYSTEM]
    with make(folder) as llm:
        expected = tokens(llm, good)
        llm.reset_prefix_cache()
        append = IncrementalDetokenizer.append
        broken: list[IncrementalDetokenizer] = []

        def failing(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
            if detokenizer in broken:
                raise ValueError("no such piece")
            return append(detokenizer, token_ids)

        begin = IncrementalDetokenizer.__init__

        def watched(detokenizer: IncrementalDetokenizer, tokenizer: Any, prompt: Sequence[int], **options: Any) -> None:
            begin(detokenizer, tokenizer, prompt, **options)
            if list(prompt) == bad:
                broken.append(detokenizer)

        monkeypatch.setattr(IncrementalDetokenizer, "append", failing)
        monkeypatch.setattr(IncrementalDetokenizer, "__init__", watched)
        first, failed, last = llm.generate([good[0], bad, good[1]], GREEDY)
        assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == expected
        assert failed.outputs[0].finish_reason == "error"
        assert "cannot be decoded: ValueError: no such piece" in failed.error
        llm.reset_prefix_cache()
        llm.generate([bad], GREEDY)
        assert llm.generate([bad[:40]], GREEDY)[0].num_cached_tokens == 0  # it has left nothing behind
        assert_clean(llm)


def test_an_interrupt_waits_for_the_step_and_ends_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = llm.engine._executor
    collect, calls = executor.collect, [0]

    def interrupted() -> Any:
        calls[0] += 1
        if calls[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return collect()

    monkeypatch.setattr(executor, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([SYSTEM, [1]], GREEDY)
    assert_clean(llm)
    assert len(tokens(llm, [[1]])[0]) == 12


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Interrupt the program as it enters the call of this number of a method."""
    method, calls = getattr(owner, name), [0]

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            signal.raise_signal(signal.SIGINT)
        return method(*arguments)

    monkeypatch.setattr(owner, name, interrupted)


def test_an_interrupt_takes_no_token_from_a_stream_that_is_open_meanwhile(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = tokens(llm, [SYSTEM])
    for number in (1, len(expected) - 1):  # in the last step, the stream ends
        stream = llm.stream([SYSTEM], GREEDY)
        next(stream)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_once(patch, llm.engine, "step", number)
            llm.generate([[1]], replace(GREEDY, max_tokens=20))
        assert list(stream)[-1].outputs[0].token_ids == expected


@pytest.mark.parametrize("place", ["scheduler.add", "processor.add", "scheduler.abort"])
def test_an_interrupt_between_steps_leaves_no_request_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner = llm.engine.scheduler if place.startswith("scheduler") else llm._processor
    if place == "scheduler.abort":  # a second interrupt, while the first one ends the call
        interrupt_once(monkeypatch, llm.engine, "step", 2)
    interrupt_once(monkeypatch, owner, place.partition(".")[2], 2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]], GREEDY)
    assert_clean(llm)
    assert not llm._processor._requests


def test_an_engine_that_fails_says_so_from_then_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(folder) as llm:

        def fail() -> Any:
            raise ZeroDivisionError("broken")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1]], GREEDY)
        with pytest.raises(ExecutionError, match="ZeroDivisionError: broken"):
            llm.generate([[1]], GREEDY)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine._executor._runner  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda *_: 1 / 0)
        (output,) = llm.generate([[1, 2]], GREEDY)
        assert output.outputs[0].finish_reason == "error"
        assert "ZeroDivisionError" in output.error
    assert len(tokens(llm, [[1, 2]])[0]) == 12


# ---- bad settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"tensor_parallel_size": 1}, "quire calls it tensor_parallel"),
        ({"kv_cache_dtype": "fp8"}, "quire calls it kv_dtype"),
        ({"scheduling_policy": "fcfs"}, "quire calls it policy"),
        ({"gpu_memory_utilization": 0.9}, "quire calls it kv_memory"),
        ({"enforce_eager": True}, "quire calls it cuda_graphs=False"),
        ({"trust_remote_code": True}, "quire never runs code that comes with a model"),
        ({"n_ctx": 512}, "quire calls it max_model_len"),
        ({"model_path": "a.gguf"}, "quire calls it model"),
        ({"revision": "main"}, "quire calls it MODEL@REVISION"),
        ({"kv_memry": "1MiB"}, "did you mean kv_memory?"),
        ({"xyzzy": 1}, "see quire.EngineConfig"),
    ],
)
def test_an_unknown_setting_leads_to_the_one_that_was_meant(settings: dict[str, Any], hint: str) -> None:
    (name,) = settings
    for kind in (LLM, AsyncLLM):
        with pytest.raises(InvalidConfigError) as caught:
            kind("guide", **settings)
        assert str(caught.value) == f"{name!r} is not a setting of quire; {hint}"


# ---- bad requests -------------------------------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ("", InvalidRequestError, "prompt is ''"),
    ([[]], InvalidRequestError, r"prompt is \[\]"),
    ({"prompt_token_ids": []}, InvalidRequestError, r"prompt is \[\]"),
    ([1] * 10_000, RequestTooLargeError, "the prompt has 10000 tokens"),
    ([[1, VOCAB_SIZE]], InvalidRequestError, r"prompt\[1\] is 384"),
    ([[-1]], InvalidRequestError, r"prompt\[0\] is -1"),
    ([[1, 2.5]], InvalidRequestError, r"prompt\[1\] is 2.5"),
    ([[1, True]], InvalidRequestError, r"prompt\[1\] is True"),
    ([[1 << 40]], InvalidRequestError, r"prompt\[0\] is"),
    ("half a pair \ud800", InvalidRequestError, "prompt is"),
    (b"bytes", InvalidRequestError, "prompt is"),
    (None, InvalidRequestError, "prompt is None"),
    ([None], InvalidRequestError, "prompt is None"),
    ([{"role": "user", "content": 5}], InvalidRequestError, r"messages\[0\].content is 5"),
    ([{"role": "nobody", "content": "x"}], InvalidRequestError, r"messages\[0\].role is 'nobody'"),
]


@pytest.mark.parametrize(("prompt", "kind", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_is_enqueued(
    llm: LLM, prompt: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        llm.generate(prompt, GREEDY)
    one = prompt[0] if isinstance(prompt, list) and prompt[:1] == [[]] else prompt
    if isinstance(one, str):
        with pytest.raises(kind, match=message):
            llm.generate(["good", one], GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"n": 1000}, "n is 1000"),
        ({"n": 2, "best_of": 1}, "best_of is 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1 << 40}, "max_tokens is"),
        ({"min_tokens": 13}, "min_tokens is 13"),
        ({"stop": ""}, "stop is ''"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "a token id in stop_token_ids is 384"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"seed": -1}, "seed is -1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "a token id in logit_bias is 384"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias\[5\] is 101.0"),
        ({"bad_words": ["ok", "  "]}, "bad_words is '  '; allowed: a word that is not only white space"),
        ({"bad_words": ["half a pair \ud800"]}, "bad_words is"),
        ({"bad_words": ["ok", "q" * 200]}, "bad_words is 'q.*; allowed: words of 1 to 32 tokens"),
        (
            {"bad_words": ["ok"], "bad_words_ids": [[i] for i in range(255)]},
            "bad_words_ids is .*; allowed: at most 256 tuples",
        ),
        ({"bad_words_ids": [[1, VOCAB_SIZE]]}, "a token id in bad_words_ids is 384"),
        ({"allowed_token_ids": []}, r"allowed_token_ids is \(\)"),
        (
            {"allowed_token_ids": [VOCAB_SIZE - 1], "min_tokens": 1},
            "allowed_token_ids is .*; allowed: at least one that",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"beam_width": 3}, "'beam_width' is not a sampling parameter"),
    ],
)
def test_bad_sampling_is_refused_by_its_name(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["good"], GREEDY, **options)


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params is 'a list of 1'; allowed: one, or 2"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="sampling_params is 5"):
        llm.generate(["a"], 5)  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == []


# ---- bad engines --------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(factory.EngineBlueprint, "build", fail)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"dtype": "float16"}, InvalidConfigError, "dtype is 'float16'"),
        ({"backend": "reference", "dtype": "bfloat16"}, InvalidConfigError, "dtype is 'bfloat16'"),
        ({"backend": "native", "block_size": 8}, InvalidConfigError, "block_size is 8"),
        ({"kv_memory": 1}, InvalidConfigError, "kv_memory is 1"),
        ({"kv_memory": "900TiB"}, InvalidConfigError, "kv_memory is"),
        ({"max_model_len": 5000}, InvalidConfigError, "max_model_len is 5000"),
        ({"tokenizer": "/nowhere"}, CheckpointError, 'No folder named "/nowhere"'),
    ],
)
def test_bad_settings_are_refused_before_weights_are_read(
    folder: Path, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make(folder, **settings)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_bad_folders_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    def refuse(name: str, message: str) -> None:
        with pytest.raises(InvalidValueError, match=message):
            make(tmp_path / name)

    refuse("nowhere", "nowhere")
    (tmp_path / "empty").mkdir()
    refuse("empty", r"config\.json")
    write_model(tmp_path / "strange", architectures=["StrangeForCausalLM"])
    refuse("strange", "StrangeForCausalLM")
    write_tiny_qwen3(tmp_path / "mute")
    refuse("mute", r"tokenizer\.json")
    write_model(tmp_path / "small", vocab_size=128, eos_token_id=127)
    refuse("small", "a tokenizer of .* ids")
    write_model(tmp_path / "torn")
    (tmp_path / "torn" / "tokenizer.json").write_text("{")
    refuse("torn", "broken")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_checkpoint_larger_than_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "free_memory", lambda: 1 << 20)
    with pytest.raises(
        InvalidConfigError, match=r"memory of weights and activations is .* the 1\.0 MiB of free memory"
    ):
        make(folder)


# ---- around it ----------------------------------------------------------------------------------------------------


def test_it_is_closed_once_and_for_all(folder: Path) -> None:
    with make(folder) as llm:
        llm.generate([[1]], GREEDY)
    llm.close()
    with pytest.raises(ExecutionError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_a_config_is_taken_as_it_is(folder: Path) -> None:
    config = EngineConfig(model=str(folder), kv_memory="1MiB", skip_tokenizer_init=True)
    with LLM(config) as llm:
        assert llm.config == config.resolved()
        assert llm.tokenizer is None
        output = llm.generate([[1, 2]], GREEDY)[0].outputs[0]
        assert (output.text, len(output.token_ids)) == ("", 12)
        with pytest.raises(InvalidRequestError, match="has no tokenizer"):
            llm.generate("text")
    with pytest.raises(InvalidConfigError, match="none, because an EngineConfig is given"):
        LLM(config, seed=1)


def test_without_the_compiled_core_the_reference_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quire.compute.native.backend", None)
    with make(folder) as llm:
        assert llm.report.backend == "reference"
        assert len(tokens(llm, [[1]])[0]) == 12
    with pytest.raises(InvalidConfigError, match="backend is 'native'; allowed: reference"):
        make(folder, backend="native")


@pytest.mark.parametrize(("dtype", "num_notices"), [("auto", 1), ("bfloat16", 1), ("float32", 0)])
def test_float16_runs_in_bfloat16_and_says_so(tmp_path: Path, dtype: str, num_notices: int) -> None:
    write_tiny_qwen3(tmp_path, settings=SETTINGS | {"dtype": "float16"}, dtype="F16")
    with make(write_chatml(tmp_path), dtype=dtype) as llm:
        said = [notice for notice in llm.report.notices if notice.startswith("float16 weights run in bfloat16")]
        assert len(said) == num_notices
        assert llm.report.dtype == ("float32" if dtype == "float32" else "bfloat16")
        assert len(tokens(llm, ["a b"])[0]) > 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_weights_of_int8_are_planned_loaded_and_reported(tmp_path: Path, stored: str, backend: str) -> None:
    write_tiny_qwen3(tmp_path, dtype=stored)
    texts = []
    for weights in ("auto", "int8"):
        with LLM(tmp_path, skip_tokenizer_init=True, weights=weights, backend=backend, kv_memory="4MiB") as llm:
            assert ("weights int8" in str(llm.report)) == (weights == "int8")
            needs = llm.report.plan.needs
            (output,) = llm.generate([[1, 2, 3, 4]], temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
            texts.append((needs.weight_bytes, output.outputs[0].logprobs))
    (wide, exact), (narrow, rounded) = texts
    assert narrow < (0.3 if backend == "reference" or stored == "F32" else 0.6) * wide
    assert exact != rounded


def test_the_table_at_the_start_adds_up(llm: LLM) -> None:
    plan = llm.report.plan
    assert sum(size for _, size in plan.parts) == plan.total_bytes
    assert plan.num_blocks == llm.engine.scheduler.memory.pool.num_blocks
    table = str(llm.report)
    for fact in ("Qwen3ForCausalLM, 3 layers", "weights", "KV blocks", "activations", "rest of the process", "total"):
        assert fact in table


def test_who_asks_is_told_how_far_the_weights_are(capfd: pytest.CaptureFixture[str]) -> None:
    noted: list[tuple[int, int, str]] = []
    with LLM("guide", kv_memory="4MiB", note_loaded=lambda *found: noted.append(found)):
        pass
    assert noted[0][0] == 0
    assert noted[-1][0] == noted[-1][1] > 0 and noted[-1][2] == "weights"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_request_chooses_tokens_that_the_makers_forbid(
    shared: LLM, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7], SYSTEM]
    favourites = {output.outputs[0].token_ids[0] for output in shared.generate(prompts, GREEDY, use_tqdm=False)}
    assert favourites
    settings = {"suppress_tokens": sorted(favourites), "do_sample": False}
    (write_model(tmp_path) / "generation_config.json").write_text(json.dumps(settings))
    with make(tmp_path, backend=backend) as llm:
        for sampling in (
            GREEDY,
            llm.get_default_sampling_params(),
            SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=30),
            replace(GREEDY, logit_bias=dict.fromkeys(favourites, 100.0)),
            replace(GREEDY, logit_bias={9: 1.0}, max_tokens=30),
        ):
            for output in llm.generate(prompts, replace(sampling, max_tokens=20), use_tqdm=False):
                assert all(favourites.isdisjoint(text.token_ids) and text.token_ids for text in output.outputs)
        monkeypatch.setattr("quire.engine.door.MAX_BIASES", len(favourites) + 1)
        with pytest.raises(
            InvalidRequestError, match="logit_bias is '2 entries'; allowed: at most 1: the model itself"
        ):
            llm.generate([[5]], replace(GREEDY, logit_bias={9: 1.0, 11: 1.0}), use_tqdm=False)
        search = SamplingParams(beam_search=True, n=2, temperature=0.0, max_tokens=4)
        assert len(llm.generate(prompts, search, use_tqdm=False)) == 2
    for value in ([VOCAB_SIZE], [-1], ["1"], 1.5):
        (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": value}))
        with pytest.raises(CheckpointError, match="suppress_tokens"):
            make(tmp_path)
