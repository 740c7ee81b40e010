// Paged attention: a query reads its sequence's keys and values through the block table.
//
// The softmax runs over fixed tiles of 64 absolute positions, in order. Each query keeps the running
// maximum, the sum of weights and the weighted sum of values:
//
//     positions    0 … 63 | 64 … 127 | 128 … 191          query at position 130
//                  tile 0 | tile 1   | tile 2             sees 128, 129, 130 of tile 2
//
// A tile begins at a multiple of 64, whatever the block size. So the order of every sum depends on the
// query's own position and window, not on blocks, chunks, neighbours or threads.
// A score lane is a token: its sum runs over the head's dimensions in order. An output lane is a dimension:
// its sum runs over the tokens in order, one step (see steps.h) after another. Several queries go through
// a tile together, each as if it were alone.
//
// Memory that the sequence did not write is never used. Scores of unwritten tokens are replaced before
// they count. Values of unwritten tokens are not read, or read as zeros if a step also has written ones.
//
// Int8 keys and values are not unpacked. Instead a query is rounded to 16 bits, with its own scale, and so
// are its weights in a tile, multiplied by the scales of the values. Sums of products are then exact
// integers, in any order, and become floats once per tile. Unwritten values get a weight of zero.
#include <cstring>
#include <limits>
#include <utility>

#include "kernels_of_set.h"
#include "kv_layout.h"
#include "quantize.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kGroups = kAttentionTile / kLanes;  // of 16 tokens, in a tile
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The largest number that a query or a weight is rounded to for int8 keys and values: a sum over 1024
// dimensions, or over the 64 tokens of a tile, then fits into 32 bits.
constexpr float kMostInput = 16383.0F;

// One query head of one token, with its running softmax. It sees the places first … end - 1 of the current
// tile.
struct Query {
    const void* vector;  // [head_dim], in the form that steps need
    float* scores;       // [64], then weights, in the form that steps need
    float* sums;         // [value_stride]
    float* output;       // [head_dim]
    std::int64_t position;
    float score_scale;
    float weight_scale;  // for int8, in the current tile
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
template <typename Number>
struct Tile {
    const Number* keys[kGroups];
    const Number* values[kGroups];
    const Number* after_keys[kGroups];
    const Number* after_values[kGroups];
    const float* key_scales[kGroups];  // for int8
    const float* value_scales[kGroups];
};

template <typename Number>
void locate(const AttentionTask& task, int kv_head, std::int64_t tile_start, int first, int end, Tile<Number>* tile) {
    const PagedKv& kv = task.kv;
    for (int group = first / kLanes; group * kLanes < end; ++group) {
        const std::int64_t position = tile_start + group * kLanes;
        const std::int64_t block = task.block_table[position / kv.block_size];
        const std::size_t in_block = position % kv.block_size;
        const std::size_t head = kv.head_offset(block, kv_head);
        const Number* keys = static_cast<const Number*>(kv.keys) + head;
        const Number* values = static_cast<const Number*>(kv.values) + head;
        tile->keys[group] = keys + in_block * key_stride<Number>(kv.head_dim);
        tile->values[group] = values + in_block * kv.value_stride();
        if constexpr (kIsInt8<Number>) {
            tile->key_scales[group] = scales_of(kv, keys) + in_block;
            tile->value_scales[group] = scales_of(kv, values) + in_block;
        }
    }
}

// Prefetches a cache line.
inline void fetch(const void* place) { __builtin_prefetch(place, 0, 3); }

constexpr int kAhead = 2;  // groups to prefetch

// Sets what to prefetch while each group of a tile is read; the group itself if nothing follows.
template <typename Number>
void look_ahead(int first, int end, const Tile<Number>& coming, int first_coming, int end_coming, Tile<Number>* tile) {
    for (int group = first; group < end; ++group) {
        const int place = group + kAhead, after = place - end;
        tile->after_keys[group] = after < 0 ? tile->keys[place] : tile->values[least(first + after, end - 1)];
        tile->after_values[group] = after < 0                           ? tile->values[place]
                                    : first_coming + after < end_coming ? coming.keys[first_coming + after]
                                                                        : tile->values[group];
    }
    if constexpr (kIsInt8<Number>) {  // one line per group
        for (int group = first_coming; group < end_coming; ++group) {
            fetch(coming.key_scales[group]);
            fetch(coming.value_scales[group]);
        }
    }
}

constexpr int kLineBytes = 64;

// Computes the scores of kCount queries with the tokens of kAtOnce groups of 16.
template <int kCount, int kAtOnce, typename Number>
void score_groups(Query* queries, const Tile<Number>& tile, int head_dim, int group) {
    using Each = Step<Number>;
    const typename Each::Input* vectors[kCount];
    typename Each::Sum sums[kCount][kAtOnce];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        vectors[q] = static_cast<const typename Each::Input*>(queries[q].vector);
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) sums[q][g] = {};
    }
    constexpr int kStepNumbers = kLanes * Each::kInputs;
    const int steps = num_steps<Number>(head_dim);
    for (int part = 0; part < kAtOnce; ++part) {  // each part prefetches one group
        const char* next = reinterpret_cast<const char*>(tile.after_keys[group + part]);
        for (int i = steps * part / kAtOnce, end = steps * (part + 1) / kAtOnce; i < end; ++i) {
            typename Each::Vector keys[kAtOnce];
            QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
                keys[g] = Each::weights(tile.keys[group + g] + static_cast<std::size_t>(i) * kStepNumbers);
            }
            for (std::size_t line = 0; line < kAtOnce * kStepNumbers * sizeof(Number); line += kLineBytes) {
                fetch(next + line);
            }
            next += kAtOnce * kStepNumbers * sizeof(Number);
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                const auto input = Each::input(vectors[q] + i);
                QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) sums[q][g] = Each::add(sums[q][g], input, keys[g]);
            }
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
            Floats scores = to_floats(sums[q][g]) * broadcast(queries[q].score_scale);
            if constexpr (kIsInt8<Number>) scores = scores * load(tile.key_scales[group + g]);
            store(queries[q].scores + (group + g) * kLanes, scores);
        }
    }
}

// As many sums at a time as there are registers for: enough to hide the latency of an addition.
#if defined(__AVX512F__)
constexpr int kSums = 16;
#else
constexpr int kSums = 4;
#endif

// Computes the scores of kCount queries with the tokens of some groups.
template <int kCount, typename Number>
void score(Query* queries, const Tile<Number>& tile, int head_dim, int group, int end_group) {
    constexpr int kAtOnce = kCount < 4 ? least(kSums / kCount, 2) : least(kSums / kCount, kGroups);
    for (; group + kAtOnce <= end_group; group += kAtOnce) {
        score_groups<kCount, kAtOnce>(queries, tile, head_dim, group);
    }
    for (; group < end_group; ++group) score_groups<kCount, 1>(queries, tile, head_dim, group);
}

// Multiplies the weights of some groups of a tile by the scales of their values, and rounds them to 16 bits.
// Weights of unseen tokens become zero, whatever their scales are.
void round_weights(Query* query, const Tile<CachedInt8>& tile, int group, int end_group) {
    for (int g = group; g < end_group; ++g) {
        float* weights = query->scores + g * kLanes;
        const Mask seen = lanes_between(query->first - g * kLanes, query->end - g * kLanes);
        store(weights, select(seen, load(weights) * load(tile.value_scales[g]), broadcast(0.0F)));
    }
    const float* weights = query->scores + group * kLanes;
    const int count = (end_group - group) * kLanes;
    const Quantizer quantizer = quantizer_of(highest_size(weights, count), kMostInput);
    query->weight_scale = quantizer.scale;
    quantize(weights, count, quantizer.factor, reinterpret_cast<std::int16_t*>(query->scores) + group * kLanes);
}

// Turns the scores of some groups of a tile into weights, and rescales the sums of the query.
template <typename Number>
void weigh(Query* query, const Tile<Number>& tile, float soft_cap, int value_stride, int group, int end_group) {
    using Each = Step<Number>;
    Floats highest = broadcast(kNothing);
    for (int g = group; g < end_group; ++g) {
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
    for (int g = group; g < end_group; ++g) {
        float* scores = query->scores + g * kLanes;
        Floats weights = exp(load(scores) - broadcast(now));
        if constexpr (!kIsInt8<Number>) weights = Each::rounded(weights);
        store(scores, weights);
        total = total + weights;
    }
    if (query->highest != now) {  // else it would be multiplied by 1
        const Floats rescale = exp(broadcast(query->highest - now));
        query->total *= rescale.part[0][0];
        query->highest = now;
        for (int d = 0; d < value_stride; d += kLanes) store(query->sums + d, load(query->sums + d) * rescale);
    }
    query->total = query->total + sum(total);
    if constexpr (kIsInt8<Number>) {
        round_weights(query, tile, group, end_group);
    } else {
        auto* weights = reinterpret_cast<typename Each::Input*>(query->scores) + group * kLanes / Each::kInputs;
        Each::inputs(query->scores + group * kLanes, (end_group - group) * kLanes, weights);
    }
}

// Adds the weighted values of some steps of tokens to the sums of kCount queries, kWide vectors of them.
// For steps that a query sees only in part, kCount must be 1, except with int8.
template <int kCount, int kWide, typename Number>
void add_wide(Query* queries, const Tile<Number>& tile, int first_step, int end_step, int value_stride, int d) {
    using Each = Step<Number>;
    constexpr int kLineNumbers = kLineBytes / sizeof(Number), kStepNumbers = kLanes * Each::kInputs;
    constexpr int kGroupSteps = kLanes / Each::kInputs;
    const typename Each::Input* weights[kCount];
    typename Each::Sum sums[kCount][kWide];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        weights[q] = reinterpret_cast<const typename Each::Input*>(queries[q].scores);
        QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
            if constexpr (kIsInt8<Number>) {
                sums[q][w] = {};
            } else {
                sums[q][w] = load(queries[q].sums + d + w * kLanes);
            }
        }
    }
    for (int step = first_step; step < end_step;) {
        const int group = step / kGroupSteps, end_of_group = least((group + 1) * kGroupSteps, end_step);
        std::size_t at = (static_cast<std::size_t>(step % kGroupSteps) * value_stride + d) * Each::kInputs;
        for (; step < end_of_group; ++step, at += static_cast<std::size_t>(value_stride) * Each::kInputs) {
            typename Each::Vector values[kWide];
            QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
                values[w] = Each::weights(tile.values[group] + at + w * kStepNumbers);
                if constexpr (kCount == 1 && !kIsInt8<Number>) {
                    const int place = step * Each::kInputs;
                    values[w] = Each::between(values[w], queries[0].first - place, queries[0].end - place);
                }
            }
            for (int i = 0; i < kWide * kStepNumbers; i += kLineNumbers) fetch(tile.after_values[group] + at + i);
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                const auto weight = Each::input(weights[q] + step);
                QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) sums[q][w] = Each::add(sums[q][w], weight, values[w]);
            }
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
            float* to = queries[q].sums + d + w * kLanes;
            if constexpr (kIsInt8<Number>) {
                store(to, fma(to_floats(sums[q][w]), broadcast(queries[q].weight_scale), load(to)));
            } else {
                store(to, sums[q][w]);
            }
        }
    }
}

// Adds the weighted values of some steps of tokens to the sums of kCount queries.
template <int kCount, typename Number>
void add_values(Query* queries, const Tile<Number>& tile, int first_step, int end_step, int value_stride) {
    if (first_step >= end_step) return;
    constexpr int kWide = least(kSums / kCount, 8);
    int d = 0;
    for (; d + kWide * kLanes <= value_stride; d += kWide * kLanes) {
        add_wide<kCount, kWide>(queries, tile, first_step, end_step, value_stride, d);
    }
    for (; d < value_stride; d += kLanes) {
        add_wide<kCount, 1>(queries, tile, first_step, end_step, value_stride, d);
    }
}

// Computes one tile for kCount queries that all see a part. The queries are in the order of their positions,
// and so are the first and last tokens that they see. Steps that all queries see in full are computed together,
// those before and after for one query at a time. With int8 all steps go together: their sums must become
// floats once, and a weight of zero adds nothing to them.
template <int kCount, typename Number>
void attend_tile(const AttentionTask& task, Query* queries, const Tile<Number>& tile) {
    constexpr int kInputs = Step<Number>::kInputs;
    const int head_dim = task.kv.head_dim, value_stride = task.kv.value_stride();
    const int first = queries[0].first, end = queries[kCount - 1].end;
    const int group = first / kLanes, end_group = pieces_of(end, kLanes);
    score<kCount>(queries, tile, head_dim, group, end_group);
    for (int q = 0; q < kCount; ++q) weigh(queries + q, tile, task.soft_cap, value_stride, group, end_group);
    if constexpr (kIsInt8<Number>) {
        add_values<kCount>(queries, tile, first / kInputs, pieces_of(end, kInputs), value_stride);
        return;
    }
    int all_first = pieces_of(queries[kCount - 1].first, kInputs), all_end = queries[0].end / kInputs;
    if (kCount == 1 || all_first >= all_end) all_first = all_end = kAttentionTile / kInputs;
    const auto add_alone = [&](int q, int from, int to) {
        from = from < queries[q].first / kInputs ? queries[q].first / kInputs : from;
        add_values<1>(queries + q, tile, from, least(to, pieces_of(queries[q].end, kInputs)), value_stride);
    };
    for (int q = 0; q < kCount; ++q) add_alone(q, 0, all_first);
    add_values<kCount>(queries, tile, all_first, all_end, value_stride);
    for (int q = 0; q < kCount; ++q) add_alone(q, all_end, kAttentionTile / kInputs);
}

std::int64_t first_seen(const AttentionTask& task, std::int64_t position) {
    return task.window == 0 || position < task.window ? 0 : position - task.window + 1;
}

template <typename Number>
void attend_some(const AttentionTask& task, Query* queries, int count, const Tile<Number>& tile) {
    int q = 0;
    if constexpr (kSums >= 16) {
        for (; q + 8 <= count; q += 8) attend_tile<8>(task, queries + q, tile);
    }
    for (; q + 4 <= count; q += 4) attend_tile<4>(task, queries + q, tile);
    for (; q + 2 <= count; q += 2) attend_tile<2>(task, queries + q, tile);
    if (q < count) attend_tile<1>(task, queries + q, tile);
}

// Sets which places of a tile the queries see; returns the range of the queries that see any.
std::pair<int, int> look(const AttentionTask& task, Query* queries, int count, std::int64_t start) {
    int low = count, high = 0;
    for (int q = 0; q < count; ++q) {
        Query& query = queries[q];
        const std::int64_t seen = first_seen(task, query.position);
        query.first =
            seen > start ? (seen - start < kAttentionTile ? static_cast<int>(seen - start) : kAttentionTile) : 0;
        const std::int64_t end = query.position + 1 - start;
        query.end = end < 0 ? 0 : end < kAttentionTile ? static_cast<int>(end) : kAttentionTile;
        if (query.first < query.end) {
            low = q < low ? q : low;
            high = q + 1;
        }
    }
    return {low, high};
}

// Computes the tiles of positions `begin` … `limit` - 1, where a tile begins at `begin`. Each head has `count`
// queries, at the same positions; the queries of the next head follow `stride` later.
template <typename Number>
void attend(const AttentionTask& task, Query* queries, int count, int stride, std::int64_t begin, std::int64_t limit) {
    std::int64_t start = first_seen(task, queries[0].position) / kAttentionTile * kAttentionTile;
    for (start = start < begin ? begin : start; start < limit; start += kAttentionTile) {
        for (int head = 0; head < task.num_kv_heads; ++head) {
            Query* own = queries + head * stride;
            const auto [low, high] = look(task, own, count, start);
            if (low >= high) break;
            Tile<Number> tile, coming;
            const int first = own[low].first, end = own[high - 1].end;
            locate(task, task.kv_head + head, start, first, end, &tile);
            const std::int64_t next = start + kAttentionTile;
            int first_coming = first, end_coming = end;
            if (head + 1 < task.num_kv_heads) {
                locate(task, task.kv_head + head + 1, start, first, end, &coming);
            } else {
                first_coming = 0;
                end_coming = next >= limit                   ? 0
                             : limit - next < kAttentionTile ? static_cast<int>(limit - next)
                                                             : kAttentionTile;
                locate(task, task.kv_head, next, 0, end_coming, &coming);
            }
            look_ahead(first / kLanes, pieces_of(end, kLanes), coming, first_coming / kLanes,
                       pieces_of(end_coming, kLanes), &tile);
            attend_some(task, own + low, high - low, tile);
        }
    }
}

// The queries of a task, before they have seen any token.
template <typename Number>
class Queries {
  public:
    Queries(const AttentionTask& task, float* scratch) : task_(task), scratch_(scratch) {}

    // Adds some query heads of one token and key-value head.
    void add(int kv_head, int token, std::int64_t position, int first_head, int num_heads) {
        const int head_dim = task_.kv.head_dim, value_stride = task_.kv.value_stride();
        for (int head = first_head; head < first_head + num_heads; ++head, ++count_) {
            const std::size_t column =
                static_cast<std::size_t>((task_.kv_head + kv_head) * task_.group + head) * head_dim;
            float* own = scratch_ + static_cast<std::size_t>(count_) * (2 * value_stride + kAttentionTile);
            Input* rounded = reinterpret_cast<Input*>(own + value_stride + kAttentionTile);
            float scale = task_.scale;
            queries_[count_] = {.vector = rounded_vector(task_.query.row(token) + column, head_dim, rounded, &scale),
                                .scores = own + value_stride,
                                .sums = own,
                                .output = task_.output.row(token) + column,
                                .position = position,
                                .score_scale = scale,
                                .weight_scale = 0.0F,
                                .highest = kNothing,
                                .total = 0.0F,
                                .first = 0,
                                .end = 0};
            for (int d = 0; d < value_stride; ++d) own[d] = 0.0F;
        }
    }

    void finish() {
        for (int q = 0; q < count_; ++q) {
            const Query& query = queries_[q];
            for (int d = 0; d < task_.kv.head_dim; ++d) query.output[d] = query.sums[d] / query.total;
        }
        count_ = 0;
    }

    Query* all() { return queries_; }

  private:
    using Input = typename Step<Number>::Input;

    // Returns a query in the form that steps need; multiplies `scale` by the scale of its rounded numbers.
    static const Input* rounded_vector(const float* row, int head_dim, Input* scratch, float* scale) {
        if constexpr (kIsInt8<Number>) {
            const Quantizer quantizer = quantizer_of(highest_size(row, head_dim), kMostInput);
            quantize(row, head_dim, quantizer.factor, reinterpret_cast<std::int16_t*>(scratch));
            *scale *= quantizer.scale;
            return scratch;
        } else {
            return Step<Number>::inputs(row, head_dim, scratch);
        }
    }

    const AttentionTask& task_;
    float* scratch_;
    Query queries_[kAttentionQueries];
    int count_ = 0;
};

// Goes through as many whole tokens at a time as fit into kAttentionQueries, and through the heads of a wide group in
// parts.
template <typename Number>
void attend_sequence(const AttentionTask& task, float* scratch) {
    Queries<Number> queries(task, scratch);
    const int heads_at_once = least(task.group, kAttentionQueries);
    const int tokens_at_once = kAttentionQueries / (heads_at_once * task.num_kv_heads);
    for (int token = 0; token < task.num_tokens; token += tokens_at_once) {
        const int end = least(task.num_tokens, token + tokens_at_once);
        for (int head = 0; head < task.group; head += heads_at_once) {
            const int num_heads = least(heads_at_once, task.group - head), count = (end - token) * num_heads;
            for (int kv_head = 0; kv_head < task.num_kv_heads; ++kv_head) {
                for (int t = token; t < end; ++t) {
                    queries.add(kv_head, task.first_token + t, task.first_position + t, head, num_heads);
                }
            }
            attend<Number>(task, queries.all(), count, count, 0, task.first_position + end);
            queries.finish();
        }
    }
}

// Computes the shared positions first, for all sequences together; then each sequence goes on alone.
template <typename Number>
void attend_members(const AttentionTask& task, float* scratch) {
    Queries<Number> queries(task, scratch);
    for (int kv_head = 0; kv_head < task.num_kv_heads; ++kv_head) {
        for (int m = 0; m < task.num_members; ++m) {
            queries.add(kv_head, task.members[m].token, task.members[m].position, 0, task.group);
        }
    }
    const int of_a_head = task.num_members * task.group;
    attend<Number>(task, queries.all(), of_a_head, of_a_head, 0, task.shared);
    AttentionTask own = task;
    for (int m = 0; m < task.num_members; ++m) {
        own.block_table = task.members[m].block_table;
        Query* first = queries.all() + m * task.group;
        attend<Number>(own, first, task.group, of_a_head, task.shared, task.members[m].position + 1);
    }
    queries.finish();
}

template <typename Number>
void attention_of(const AttentionTask& task, float* scratch) {
    if (task.num_members > 0) {
        attend_members<Number>(task, scratch);
    } else {
        attend_sequence<Number>(task, scratch);
    }
}

}  // namespace

void attention(const AttentionTask& task, float* scratch) {
    switch (task.kv.type) {
        case NumberType::kFloat32:
            return attention_of<float>(task, scratch);
        case NumberType::kBfloat16:
            return attention_of<std::uint16_t>(task, scratch);
        case NumberType::kInt8:
            return attention_of<CachedInt8>(task, scratch);
        case NumberType::kCoded:
            return;  // only matrices are
    }
}

}  // namespace quire::QUIRE_ISA
