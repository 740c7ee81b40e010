"""Workload files of the benchmarks: what is read, what is refused, how ids are shifted; and the memory of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.instruments.bench.process_memory import process_memory
from quire.instruments.bench.workload_file import (
    Workload,
    WorkloadError,
    WorkloadRequest,
    read_workload,
    single_request,
)

GOOD = '{"id": 0, "prompt_token_ids": [300, 5], "max_tokens": 4, "n": 2}'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "workload_some.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_workload_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", '{"prompt_token_ids": [1], "max_tokens": 3, "arrival_s": 0.5}')
    workload = read_workload(path)
    assert workload == Workload("some", (WorkloadRequest((300, 5), 4, 2), WorkloadRequest((1,), 3)))
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (3, 11)
    assert read_workload(path, limit=1).requests == workload.requests[:1]


def test_one_output_is_greedy_and_several_are_drawn() -> None:
    one, several = WorkloadRequest((1,), 3).sampling, WorkloadRequest((1,), 3, 4).sampling
    assert (one.temperature, one.n, one.max_tokens, one.ignore_eos) == (0.0, 1, 3, True)
    assert (several.temperature, several.n) == (1.0, 4)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "a JSON object"),
        ("[1]", "a JSON object"),
        ('{"max_tokens": 4}', "prompt_token_ids is None"),
        ('{"prompt_token_ids": [], "max_tokens": 4}', "prompt_token_ids is []"),
        ('{"prompt_token_ids": [1, "2"], "max_tokens": 4}', "a list of one or more token ids"),
        ('{"prompt_token_ids": [-1], "max_tokens": 4}', "a list of one or more token ids"),
        ("[" * 100_000, "a JSON object with prompt_token_ids"),
        ('{"prompt_token_ids": [1]}', "max_tokens is None"),
        ('{"prompt_token_ids": [1], "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt_token_ids": [1], "max_tokens": true}', "max_tokens is True"),
        ('{"prompt_token_ids": [1], "max_tokens": 1, "n": 1.5}', "n is 1.5"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert f"{path}, line 2" in str(caught.value)
    assert what in str(caught.value)


def test_a_file_without_requests_or_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="one request or more"):
        read_workload(write(tmp_path, "", " "))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(WorkloadError, match="UTF-8"):
        read_workload(tmp_path / "bytes")


def test_a_shift_is_that_of_the_other_runners() -> None:
    """The formula of the runners of the peers, written out."""
    prompt, vocab_size, repeat = (300, 77_000, 144_338), 151_936, 5
    span = int(vocab_size * 0.95) - 300
    expected = tuple(300 + (token - 300 + 977 * repeat) % span for token in prompt)
    assert Workload("", (WorkloadRequest(prompt, 1),)).shifted(repeat, vocab_size).requests[0] == WorkloadRequest(
        expected, 1
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 48, 600, 2048])
def test_a_shift_stays_within_a_small_vocabulary(vocab_size: int) -> None:
    workload = Workload("", (WorkloadRequest(tuple(range(0, 150_000, 997)), 1, 3),))
    for repeat in range(3):
        (shifted,) = workload.shifted(repeat, vocab_size).requests
        assert all(0 <= token < vocab_size for token in shifted.prompt_token_ids)
        assert (shifted.max_tokens, shifted.n) == (1, 3)


def test_prompts_that_begin_alike_go_on_doing_so() -> None:
    workload = Workload("", tuple(WorkloadRequest((9, 8, 7, last), 1) for last in (1, 2)))
    one, other = workload.shifted(3, 2048).requests
    assert one.prompt_token_ids[:3] == other.prompt_token_ids[:3] != (9, 8, 7)


def test_single_requests_are_known() -> None:
    request = WorkloadRequest((1,), 8)
    assert single_request(Workload("", (request,))) is request
    for requests in ((request, request), (WorkloadRequest((1,), 1),), (WorkloadRequest((1,), 8, 2),)):
        assert single_request(Workload("", requests)) is None


def test_memory_is_read_from_what_the_system_says(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t 40 kB\nVmRSS:\t 30 kB\nRssFile:\t 10 kB\n", encoding="utf-8")
    memory = process_memory(status)
    assert memory is not None
    assert (memory.peak, memory.resident, memory.of_files) == (40960, 30720, 10240)
    status.write_text("VmHWM:\t 40 kB\n", encoding="utf-8")
    assert process_memory(status) is None
    assert process_memory(tmp_path / "missing") is None


def test_a_repeat_has_other_ids_and_is_otherwise_the_same() -> None:
    requests = WorkloadRequest((300, 999), 4, temperature=0.6), WorkloadRequest((301,), 3, 2)
    shifted = Workload("", requests).shifted(1, 1000).requests
    assert [each.prompt_token_ids for each in shifted] == [(627, 676), (628,)]
    assert [each.sampling.temperature for each in shifted] == [0.6, 1.0]
    assert [(each.max_tokens, each.n) for each in shifted] == [(4, 1), (3, 2)]
    assert WorkloadRequest((1,), 1).sampling.temperature == 0.0
