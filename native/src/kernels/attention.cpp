// Paged attention: a query reads its sequence's keys and values through the block table.
//
// The softmax runs over fixed tiles of 64 absolute positions, in order, and keeps per query the
// running maximum, the sum of weights and the weighted sum of values:
//
//     positions    0 … 63 | 64 … 127 | 128 … 191          query at position 130
//                  tile 0 | tile 1   | tile 2             of tile 2 it sees 128, 129, 130
//
// A tile begins at a multiple of 64 whatever the block size is, so which numbers are added to which
// depends on the query's own position and window: not on blocks, chunks, neighbours or threads.
// Scores have a token in each lane, hence their sums run over the head's dimensions in order;
// outputs have a dimension in each lane, and their sums run over the tokens in order. Several
// queries go through a tile side by side, each as if it were alone.
//
// Nothing that the sequence did not write is used: scores of unwritten tokens are replaced before
// they count, values of unwritten tokens are not read.
#include <cstring>
#include <limits>

#include "kernels_of_set.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kGroups = kAttentionTile / kLanes;  // of 16 tokens, in a tile
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// One query head of one token, with its running softmax. `first` and `end` bound what it sees of
// the tile at hand, as places in the tile.
struct Query {
    const float* vector;  // [head_dim]
    float* scores;        // [64], then weights
    float* sums;          // [value_stride]
    float* output;        // [head_dim]
    std::int64_t position;
    float highest;
    float total;
    int first;
    int end;
};

// Where the tokens of a tile lie: the keys of each 16, and the value of each. Only groups and
// tokens between first and end are looked up.
template <typename Number>
struct Tile {
    const Number* keys[kGroups];
    const Number* values[kAttentionTile];
};

template <typename Number>
void locate(const AttentionTask& task, std::int64_t tile_start, int first, int end, Tile<Number>* tile) {
    const PagedKv& kv = task.kv;
    const std::size_t stride = kv.value_stride();
    for (int place = first / kLanes * kLanes; place < end; place += kLanes) {
        const std::int64_t position = tile_start + place;
        const std::int64_t block = task.block_table[position / kv.block_size];
        const std::size_t in_block = position % kv.block_size;
        const std::size_t head = kv.head_offset(block, task.kv_head);
        tile->keys[place / kLanes] = static_cast<const Number*>(kv.keys) + head + in_block * kv.head_dim;
        const Number* values = static_cast<const Number*>(kv.values) + head + in_block * stride;
        for (int i = 0; i < kLanes; ++i) tile->values[place + i] = values + i * stride;
    }
}

// Scores of kCount queries with the tokens of one group of 16.
template <int kCount, typename Number>
void score(Query* queries, const Number* keys, int head_dim, float scale, int group) {
    Floats sums[kCount];
    for (int q = 0; q < kCount; ++q) sums[q] = broadcast(0.0F);
    for (int d = 0; d < head_dim; ++d) {
        const Floats key = load(keys + static_cast<std::size_t>(d) * kLanes);
        for (int q = 0; q < kCount; ++q) sums[q] = fma(broadcast(queries[q].vector[d]), key, sums[q]);
    }
    for (int q = 0; q < kCount; ++q) store(queries[q].scores + group * kLanes, sums[q] * broadcast(scale));
}

// Turns the scores of what the query sees into weights and rescales what it has summed up.
void weigh(Query* query, float soft_cap, int value_stride) {
    const int first_group = query->first / kLanes, end_group = (query->end + kLanes - 1) / kLanes;
    Floats highest = broadcast(kNothing);
    for (int g = first_group; g < end_group; ++g) {
        float* scores = query->scores + g * kLanes;
        Floats score = load(scores);
        if (soft_cap > 0.0F) score = broadcast(soft_cap) * tanh(score / broadcast(soft_cap));
        const Mask seen = lanes_between(query->first - g * kLanes, query->end - g * kLanes);
        score = select(seen, score, broadcast(kNothing));
        store(scores, score);
        highest = max(highest, score);
    }
    const float in_tile = quire::QUIRE_ISA::highest(highest);
    const float now = query->highest < in_tile ? in_tile : query->highest;
    Floats total = broadcast(0.0F);
    for (int g = first_group; g < end_group; ++g) {
        float* scores = query->scores + g * kLanes;
        const Floats weights = exp(load(scores) - broadcast(now));
        store(scores, weights);
        total = total + weights;
    }
    const Floats rescale = exp(broadcast(query->highest - now));
    float factor[kLanes];
    store(factor, rescale);
    query->total = query->total * factor[0] + sum(total);
    query->highest = now;
    for (int d = 0; d < value_stride; d += kLanes) store(query->sums + d, load(query->sums + d) * rescale);
}

// Adds the values of places first … end - 1, weighted, to the sums of kCount queries.
template <int kCount, typename Number>
void add_values(Query* queries, const Tile<Number>& tile, int first, int end, int value_stride) {
    constexpr int kWide = 2;  // vectors of dimensions at a time
    int d = 0;
    for (; d + kWide * kLanes <= value_stride; d += kWide * kLanes) {
        Floats sums[kCount][kWide];
        for (int q = 0; q < kCount; ++q) {
            for (int w = 0; w < kWide; ++w) sums[q][w] = load(queries[q].sums + d + w * kLanes);
        }
        for (int place = first; place < end; ++place) {
            Floats value[kWide];
            for (int w = 0; w < kWide; ++w) value[w] = load(tile.values[place] + d + w * kLanes);
            for (int q = 0; q < kCount; ++q) {
                const Floats weight = broadcast(queries[q].scores[place]);
                for (int w = 0; w < kWide; ++w) sums[q][w] = fma(weight, value[w], sums[q][w]);
            }
        }
        for (int q = 0; q < kCount; ++q) {
            for (int w = 0; w < kWide; ++w) store(queries[q].sums + d + w * kLanes, sums[q][w]);
        }
    }
    for (; d < value_stride; d += kLanes) {
        for (int q = 0; q < kCount; ++q) {
            Floats sums = load(queries[q].sums + d);
            for (int place = first; place < end; ++place) {
                sums = fma(broadcast(queries[q].scores[place]), load(tile.values[place] + d), sums);
            }
            store(queries[q].sums + d, sums);
        }
    }
}

// One tile for kCount queries that all see some of it. They stand in the order of their positions,
// so what they see begins and ends in that order: the places that all of them see go together, the
// ones before and after one query at a time.
template <int kCount, typename Number>
void attend_tile(const AttentionTask& task, Query* queries, const Tile<Number>& tile) {
    const int head_dim = task.kv.head_dim, value_stride = task.kv.value_stride();
    const int first = queries[0].first, end = queries[kCount - 1].end;
    for (int g = first / kLanes; g * kLanes < end; ++g) {
        score<kCount>(queries, tile.keys[g], head_dim, task.scale, g);
    }
    for (int q = 0; q < kCount; ++q) weigh(queries + q, task.soft_cap, value_stride);
    const int all_first = queries[kCount - 1].first, all_end = queries[0].end;
    if (kCount == 1 || all_first >= all_end) {
        for (int q = 0; q < kCount; ++q) {
            add_values<1>(queries + q, tile, queries[q].first, queries[q].end, value_stride);
        }
        return;
    }
    for (int q = 0; q < kCount; ++q) add_values<1>(queries + q, tile, queries[q].first, all_first, value_stride);
    add_values<kCount>(queries, tile, all_first, all_end, value_stride);
    for (int q = 0; q < kCount; ++q) add_values<1>(queries + q, tile, all_end, queries[q].end, value_stride);
}

template <typename Number>
void attend_some(const AttentionTask& task, Query* queries, int count, const Tile<Number>& tile) {
    int q = 0;
    for (; q + 4 <= count; q += 4) attend_tile<4>(task, queries + q, tile);
    for (; q + 2 <= count; q += 2) attend_tile<2>(task, queries + q, tile);
    if (q < count) attend_tile<1>(task, queries + q, tile);
}

template <typename Number>
void attend(const AttentionTask& task, Query* queries, int count) {
    const auto first_seen = [&](std::int64_t position) -> std::int64_t {
        return task.window == 0 || position < task.window ? 0 : position - task.window + 1;
    };
    const std::int64_t last = queries[count - 1].position;
    std::int64_t start = first_seen(queries[0].position) / kAttentionTile * kAttentionTile;
    for (; start <= last; start += kAttentionTile) {
        int low = count, high = 0;  // the queries that see some of this tile
        for (int q = 0; q < count; ++q) {
            Query& query = queries[q];
            const std::int64_t seen = first_seen(query.position);
            query.first =
                seen > start ? (seen - start < kAttentionTile ? static_cast<int>(seen - start) : kAttentionTile) : 0;
            const std::int64_t end = query.position + 1 - start;
            query.end = end < 0 ? 0 : end < kAttentionTile ? static_cast<int>(end) : kAttentionTile;
            if (query.first < query.end) {
                low = q < low ? q : low;
                high = q + 1;
            }
        }
        if (low >= high) continue;
        Tile<Number> tile;
        locate(task, start, queries[low].first, queries[high - 1].end, &tile);
        attend_some(task, queries + low, high - low, tile);
    }
}

std::uint16_t to_bfloat16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // NaN stays one
    bits += 0x7fffU + ((bits >> 16) & 1U);  // to nearest, ties to even
    return static_cast<std::uint16_t>(bits >> 16);
}

void put(float* to, float value) { *to = value; }
void put(std::uint16_t* to, float value) { *to = to_bfloat16(value); }

template <typename Number>
void write_of(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value) {
    const std::size_t head = kv.head_offset(slot / kv.block_size, kv_head);
    const int in_block = static_cast<int>(slot % kv.block_size), stride = kv.value_stride();
    Number* keys = static_cast<Number*>(kv.keys) + head +
                   static_cast<std::size_t>(in_block / kLanes) * kLanes * kv.head_dim + in_block % kLanes;
    Number* values = static_cast<Number*>(kv.values) + head + static_cast<std::size_t>(in_block) * stride;
    for (int d = 0; d < kv.head_dim; ++d) {
        put(keys + static_cast<std::size_t>(d) * kLanes, key[d]);
        put(values + d, value[d]);
    }
    for (int d = kv.head_dim; d < stride; ++d) values[d] = Number(0);
}

}  // namespace

void write_kv(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value) {
    if (kv.type == NumberType::kFloat32) {
        write_of<float>(kv, slot, kv_head, key, value);
    } else {
        write_of<std::uint16_t>(kv, slot, kv_head, key, value);
    }
}

void attention(const AttentionTask& task, float* scratch) {
    const int head_dim = task.kv.head_dim, value_stride = task.kv.value_stride();
    Query queries[kAttentionQueries];
    // Whole tokens at a time, as many as fit into the room for queries; heads of a wide group in parts.
    const int heads_at_once = task.group < kAttentionQueries ? task.group : kAttentionQueries;
    const int tokens_at_once = kAttentionQueries / heads_at_once;
    for (int token = 0; token < task.num_tokens; token += tokens_at_once) {
        const int num_tokens = task.num_tokens - token < tokens_at_once ? task.num_tokens - token : tokens_at_once;
        for (int head = 0; head < task.group; head += heads_at_once) {
            const int num_heads = task.group - head < heads_at_once ? task.group - head : heads_at_once;
            int count = 0;
            for (int t = 0; t < num_tokens; ++t) {
                for (int h = 0; h < num_heads; ++h, ++count) {
                    const std::size_t column =
                        static_cast<std::size_t>(task.kv_head * task.group + head + h) * head_dim;
                    float* own = scratch + static_cast<std::size_t>(count) * (value_stride + kAttentionTile);
                    queries[count] = {.vector = task.query.row(task.first_token + token + t) + column,
                                      .scores = own + value_stride,
                                      .sums = own,
                                      .output = task.output.row(task.first_token + token + t) + column,
                                      .position = task.first_position + token + t,
                                      .highest = kNothing,
                                      .total = 0.0F,
                                      .first = 0,
                                      .end = 0};
                    for (int d = 0; d < value_stride; ++d) own[d] = 0.0F;
                }
            }
            if (task.kv.type == NumberType::kFloat32) {
                attend<float>(task, queries, count);
            } else {
                attend<std::uint16_t>(task, queries, count);
            }
            for (int q = 0; q < count; ++q) {
                for (int d = 0; d < head_dim; ++d) queries[q].output[d] = queries[q].sums[d] / queries[q].total;
            }
        }
    }
}

}  // namespace quire::QUIRE_ISA
