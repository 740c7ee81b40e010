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
    const float* biases;  // by position, from 0 on; null: none
    float sink;           // kNothing: none
    float score_scale;
    float weight_scale;  // for integers, in the current tile
    float centres;       // for int4: the weighted sum of the centres of the values
    float centre_sum;    // for int4: the centre of 0 … 15, times the sum of the rounded weights in the current tile
    float highest;
    float total;
    int first;
    int end;
};

// The keys or the values of some groups of one head, and the memory to prefetch after each group.
template <typename Number>
struct Part {
    int first = 0;  // groups of the tile
    int end = 0;
    const Number* numbers[kGroups];
    const ScaleOf<Number>* scales[kGroups];
    const char* next[kGroups];
};

// The memory of a tile. A block holds one head after another, so memory is read in long stretches if a few groups are
// computed for every head before the next groups:
//
//     keys 0, 1 of head 0, of head 1, …   keys 2, 3 of head 0, of head 1, …   values 0, 1 of head 0, …   next tile
//
// While some groups are read, the next groups in this order are prefetched: they are small enough to stay in a
// near cache until they are needed.
template <typename Key, typename Value>
class Tile {
  public:
    Tile(const AttentionTask& task, std::int64_t start, int first, int end)
        : start_(start), first_(first / kLanes), end_(pieces_of(end, kLanes)), num_heads_(task.num_kv_heads) {
        const PagedKv& kv = task.kv;
        key_head_bytes_ = kv.block_size * kv.key_bytes();
        value_head_bytes_ = kv.block_size * kv.value_bytes();
        num_groups_in_block_ = kv.block_size / kLanes;
        for (int group = first_; group < end_; ++group) {
            const auto position = static_cast<std::uint32_t>(start) + group * kLanes;
            const std::int64_t block = task.block_table[position / static_cast<std::uint32_t>(kv.block_size)];
            const std::size_t in_block = position % static_cast<std::uint32_t>(kv.block_size);
            const Key* keys = reinterpret_cast<const Key*>(kv.keys_of(block, task.kv_head));
            const Value* values = reinterpret_cast<const Value*>(kv.values_of(block, task.kv_head));
            keys_[group] = keys + in_block * key_stride<Key>(kv);
            values_[group] = values + in_block * value_elements<Value>(kv);
            if constexpr (kIsWhole<Key>) key_scales_[group] = scales_of(kv, keys) + in_block;
            if constexpr (kIsWhole<Value>) value_scales_[group] = scales_of(kv, values) + in_block;
        }
    }

    std::int64_t start() const { return start_; }
    int first() const { return first_; }
    int end() const { return end_; }

    Part<Key> keys(int head, int first, int end) const {
        Part<Key> part = part_of(keys_, key_scales_, key_head_bytes_, head, first, end);
        if (head + 1 == num_heads_ && end == end_) follow(&part, values_, first_, end_);
        return part;
    }

    Part<Value> values(int head, int first, int end, const Tile& coming) const {
        Part<Value> part = part_of(values_, value_scales_, value_head_bytes_, head, first, end);
        if (head + 1 == num_heads_ && end == end_) follow(&part, coming.keys_, coming.first_, coming.end_);
        return part;
    }

    // Prefetches some of the values that will be read first: memory must not idle while `count` queries from `query`
    // on, counted over all heads, are weighed.
    void fetch_values(int query, int count) const {
        constexpr std::size_t kBytes = 512;  // for each query, and of each of two groups
        const std::size_t group_bytes = value_head_bytes_ / num_groups_in_block_;
        for (std::size_t at = query * kBytes, end = at + count * kBytes; at < end; at += kLineBytes) {
            const std::size_t head = at / group_bytes;
            if (head >= static_cast<std::size_t>(num_heads_)) return;
            for (int group = first_; group < least(first_ + 2, end_); ++group) {
                prefetch(reinterpret_cast<const char*>(values_[group]) + head * value_head_bytes_ + at % group_bytes);
            }
        }
    }

  private:
    template <typename Number>
    Part<Number> part_of(const Number* const* numbers, const ScaleOf<Number>* const* scales, std::size_t head_bytes,
                         int head, int first, int end) const {
        const auto of_head = [&](const auto* place, int which) {
            const char* bytes = reinterpret_cast<const char*>(place) + which * head_bytes;
            return reinterpret_cast<decltype(place)>(bytes);
        };
        Part<Number> part;
        part.first = first;
        part.end = end;
        const int next_head = head + 1 < num_heads_ ? head + 1 : 0, later = next_head > 0 ? 0 : end - first;
        for (int group = first; group < end; ++group) {
            const int next_group = least(group + later, end_ - 1);
            part.numbers[group] = of_head(numbers[group], head);
            part.next[group] = reinterpret_cast<const char*>(of_head(numbers[next_group], next_head));
            if constexpr (kIsWhole<Number>) {
                part.scales[group] = of_head(scales[group], head);
                prefetch(of_head(scales[next_group], next_head));
            }
        }
        return part;
    }

    // Sets the groups to prefetch after the last part: the same number of groups of `numbers`, if any.
    template <typename Number, typename After>
    static void follow(Part<Number>* part, const After* const* numbers, int first, int end) {
        for (int group = part->first; group < part->end && first < end; ++group) {
            part->next[group] = reinterpret_cast<const char*>(numbers[least(first + group - part->first, end - 1)]);
        }
    }

    std::int64_t start_;
    int first_;  // groups that any query sees
    int end_;
    int num_heads_;
    std::size_t key_head_bytes_;
    std::size_t value_head_bytes_;
    std::size_t num_groups_in_block_;
    // Of the first head, by group.
    const Key* keys_[kGroups];
    const Value* values_[kGroups];
    const ScaleOf<Key>* key_scales_[kGroups];
    const ScaleOf<Value>* value_scales_[kGroups];
};

// As many sums at a time as there are registers for: enough to hide the latency of an addition.
#if defined(__AVX512F__)
constexpr int kSums = 16;
#else
constexpr int kSums = 4;
#endif

}  // namespace quire::QUIRE_ISA
