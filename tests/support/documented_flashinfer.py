"""FlashInfer as its documentation describes it, in float64 on any device: what its wrappers are told, and its meaning.

Its kernels need a GPU; this takes their place where there is none, so that what is handed to them can be computed with.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class _Wrapper:
    causal = False

    def __init__(self, scratch: torch.Tensor, kv_layout: str, *, backend: str, use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND"
        self._told: dict[str, Any] = {}

    def _take(self, starts: torch.Tensor, pages: tuple[torch.Tensor, ...], **told: Any) -> None:
        for array in (starts, *pages):
            assert array.dtype is torch.int32
        self._starts, self._pages, self._told = starts, pages, told

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        indptr, indices, last_page_len = self._pages
        assert len(q) == self._starts[-1]
        for request, last in enumerate(last_page_len.tolist()):
            ids = indices[indptr[request] : indptr[request + 1]].long()
            rows = slice(int(self._starts[request]), int(self._starts[request + 1]))
            kv_len = (len(ids) - 1) * paged_kv_cache[0].shape[2] + last
            keys, values = (each[ids].transpose(0, 1).flatten(1, 2)[:, :kv_len].double() for each in paged_kv_cache)
            out[rows] = self._attended(q[rows].double(), keys, values).to(out.dtype)

    def _attended(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        told, group = self._told, q.shape[1] // len(keys)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->hqk", q, keys) * told["sm_scale"]
        if told["logits_soft_cap"]:
            scores = told["logits_soft_cap"] * torch.tanh(scores / told["logits_soft_cap"])
        places = torch.arange(keys.shape[1], device=q.device)
        distance = places[len(places) - len(q) :, None] - places
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if told["window_left"] >= 0:
            seen &= distance <= told["window_left"]
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        return torch.einsum("hqk,hkd->qhd", weights, values)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query a request, which sees all of it but what lies before its window."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **told: Any,
    ) -> None:
        self._take(torch.arange(len(indptr), dtype=torch.int32), (indptr, indices, last_page_len), **told)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """The last tokens of each request."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        **told: Any,
    ) -> None:
        self.causal = causal
        self._take(qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), **told)
