// A tile of attention: the queries that go through it, and the memory that they read; see attention.cpp.
#pragma once

#include <limits>

#include "kv_layout.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kGroups = kAttentionTile / kLanes;  // of 16 tokens, in a tile
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The largest number that a query or a weight is rounded to for int8 keys and values: a sum over 1024
// dimensions, or over the 64 tokens of a tile, then fits into 32 bits.
constexpr float kMostInput = 16383.0F;

// One query head of one token, with its running softmax. It sees the places first … end - 1 of the current
// tile.
struct Query {
    const void* vector;  // [head_dim], in the form that steps need; for int4, then the sums of its groups
    float* scores;       // [64], then weights, in the form that steps need
    float* sums;         // [value_stride]
    float* output;       // [head_dim]
    std::int64_t position;
    float score_scale;
    float weight_scale;  // for whole numbers, in the current tile
    float centres;       // for int4: the weighted sum of the centres of the values
    float centre_sum;    // for int4: the centre of 0 … 15, times the sum of the rounded weights in the current tile
    float highest;
    float total;
    int first;
    int end;
};

// The memory of a tile: the keys and the values of each group of 16 tokens. Only groups that have a token
// between first and end are set. They are read in this order, and while one is read, the one two places
// later is prefetched:
//
//     keys 0, 1, 2, 3, values 0, 1, 2, 3, keys of the next head's or the next tile 0, 1, …
//
// That is little enough to stay in the nearest cache until it is needed.
template <typename Key, typename Value>
struct Tile {
    const Key* keys[kGroups];
    const Value* values[kGroups];
    const void* after_keys[kGroups];
    const void* after_values[kGroups];
    const ScaleOf<Key>* key_scales[kGroups];
    const ScaleOf<Value>* value_scales[kGroups];
};

template <typename Key, typename Value>
void locate(const AttentionTask& task, int kv_head, std::int64_t tile_start, int first, int end,
            Tile<Key, Value>* tile) {
    const PagedKv& kv = task.kv;
    for (int group = first / kLanes; group * kLanes < end; ++group) {
        const std::int64_t position = tile_start + group * kLanes;
        const std::int64_t block = task.block_table[position / kv.block_size];
        const std::size_t in_block = position % kv.block_size;
        const Key* keys = reinterpret_cast<const Key*>(kv.keys_of(block, kv_head));
        const Value* values = reinterpret_cast<const Value*>(kv.values_of(block, kv_head));
        tile->keys[group] = keys + in_block * key_stride<Key>(kv);
        tile->values[group] = values + in_block * value_elements<Value>(kv);
        if constexpr (kIsWhole<Key>) tile->key_scales[group] = scales_of(kv, keys) + in_block;
        if constexpr (kIsWhole<Value>) tile->value_scales[group] = scales_of(kv, values) + in_block;
    }
}

// Prefetches a cache line.
inline void fetch(const void* place) { __builtin_prefetch(place, 0, 3); }

constexpr int kAhead = 2;  // groups to prefetch

// Sets what to prefetch while each group of a tile is read; the group itself if nothing follows.
template <typename Key, typename Value>
void look_ahead(int first, int end, const Tile<Key, Value>& coming, int first_coming, int end_coming,
                Tile<Key, Value>* tile) {
    const auto as_bytes = [](const auto* place) { return static_cast<const void*>(place); };
    for (int group = first; group < end; ++group) {
        const int place = group + kAhead, after = place - end;
        tile->after_keys[group] =
            after < 0 ? as_bytes(tile->keys[place]) : as_bytes(tile->values[least(first + after, end - 1)]);
        tile->after_values[group] = after < 0                           ? as_bytes(tile->values[place])
                                    : first_coming + after < end_coming ? as_bytes(coming.keys[first_coming + after])
                                                                        : as_bytes(tile->values[group]);
    }
    for (int group = first_coming; group < end_coming; ++group) {  // one line per group
        if constexpr (kIsWhole<Key>) fetch(coming.key_scales[group]);
        if constexpr (kIsWhole<Value>) fetch(coming.value_scales[group]);
    }
}

constexpr int kLineBytes = 64;

// As many sums at a time as there are registers for: enough to hide the latency of an addition.
#if defined(__AVX512F__)
constexpr int kSums = 16;
#else
constexpr int kSums = 4;
#endif

}  // namespace quire::QUIRE_ISA
