// Paged attention: a query reads its sequence's keys and values through the block table.
//
// The softmax runs over fixed tiles of 64 absolute positions, in order. Each query keeps the running
// maximum, the sum of weights and the weighted sum of values:
//
//     positions    0 … 63 | 64 … 127 | 128 … 191          query at position 130
//                  tile 0 | tile 1   | tile 2             sees 128, 129, 130 of tile 2
//
// In an encoder it also sees the later positions of its text, all written in the same step.
// A tile begins at a multiple of 64, for any block size. So the order of every sum depends on the
// query's own position and window, not on blocks, chunks, neighbours or threads.
// A score lane is a token: its sum runs over the head's dimensions in order. An output lane is a dimension:
// its sum runs over the tokens in order, one step (see steps.h) after another. Several queries go through
// a tile together, but do not affect each other.
//
// Memory that the sequence did not write is never used. Scores of unwritten tokens are replaced before
// they count. Values of unwritten tokens are not read, or read as zeros if a step also has written ones.
//
// Int8 keys and values are not unpacked. Instead a query is rounded to 16 bits, with its own scale, and so
// are its weights in a tile, multiplied by the scales of the values. Sums of products are then exact
// integers, in any order, and become floats once per tile. Unwritten values get a weight of zero.
// Keys and values of 4 bits are treated likewise. They are rotated, and so are the query and the output; see int4.h.
// The minimum of a key is multiplied by the sum of the query. Values count from the centre of their range: the weight
// of a token, rounded, is multiplied by n - 7.5, and as a float by scale * 7.5 + minimum. So the rounding errors of the
// numbers have either sign. The rotation of the output would collect equal errors in one number.
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "attention_int4.h"
#include "attention_latent.h"
#include "attention_tile.h"
#include "kernels_of_set.h"
#include "kv_layout.h"
#include "quantize.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Computes the scores of kCount queries with the tokens of kAtOnce groups of 16.
template <int kCount, int kAtOnce, typename Key>
void score_groups(Query* queries, const Part<Key>& part, const PagedKv& kv, int group) {
    using Each = Step<Key>;
    const typename Each::Input* vectors[kCount];
    typename Each::Sum sums[kCount][kAtOnce];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        vectors[q] = static_cast<const typename Each::Input*>(queries[q].vector);
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) sums[q][g] = typename Each::Sum{};
    }
    constexpr int kStepNumbers = kLanes * Each::kInputs;
    const int steps = num_steps<Key>(kv.head_dim);
    for (int turn = 0; turn < kAtOnce; ++turn) {  // each prefetches one group
        const char* next = part.next[group + turn];
        for (int i = steps * turn / kAtOnce, end = steps * (turn + 1) / kAtOnce; i < end; ++i) {
            typename Each::Vector keys[kAtOnce];
            QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
                keys[g] = Each::weights(part.numbers[group + g] + static_cast<std::size_t>(i) * kStepNumbers);
            }
            for (std::size_t line = 0; line < kAtOnce * kStepNumbers * sizeof(Key); line += kLineBytes) {
                prefetch(next + line);
            }
            next += kAtOnce * kStepNumbers * sizeof(Key);
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                const auto input = Each::input(vectors[q] + i);
                QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) sums[q][g] = Each::add(sums[q][g], input, keys[g]);
            }
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
            Floats scores = to_floats(sums[q][g]) * broadcast(queries[q].score_scale);
            if constexpr (kIsInt8<Key>) scores = scores * load(part.scales[group + g]);
            store(queries[q].scores + (group + g) * kLanes, scores);
        }
    }
}

// Computes the scores of kCount queries with the tokens of some groups.
template <int kCount, typename Key>
void score(Query* queries, const Part<Key>& keys, const PagedKv& kv) {
    constexpr int kMost = kIsInt4<Key> ? 2 : kGroups;
    constexpr int kAtOnce = least(kSums / kCount, kCount < 4 ? 2 : kMost);
    int group = keys.first;
    for (; group + kAtOnce <= keys.end; group += kAtOnce) score_groups<kCount, kAtOnce>(queries, keys, kv, group);
    for (; group < keys.end; ++group) score_groups<kCount, 1>(queries, keys, kv, group);
}

// Multiplies the weights of some groups of a tile by the scales of their values, and rounds them to 16 bits.
// Weights of unseen tokens become zero, even if their scales are NaN.
template <typename Value>
void round_weights(Query* query, const Part<Value>& part) {
    const Floats zero = broadcast(0.0F);
    Floats centres = zero;
    for (int g = part.first; g < part.end; ++g) {
        float* to = query->scores + g * kLanes;
        const Mask seen = lanes_between(query->first - g * kLanes, query->end - g * kLanes);
        const Floats weights = load(to);
        if constexpr (kIsInt4<Value>) {
            const Scales scales(part.scales[g]);
            const Floats centre = scales.scale * broadcast(kInt4Centre) + scales.minimum;
            centres = centres + select(seen, weights * centre, zero);
            store(to, select(seen, weights * scales.scale, zero));
        } else {
            store(to, select(seen, weights * load(part.scales[g]), zero));
        }
    }
    const float* weights = query->scores + part.first * kLanes;
    const int count = (part.end - part.first) * kLanes;
    const Quantizer quantizer = quantizer_of(highest_size(weights, count), kMostInput);
    query->weight_scale = quantizer.scale;
    std::int16_t* rounded = reinterpret_cast<std::int16_t*>(query->scores) + part.first * kLanes;
    quantize(weights, count, quantizer.factor, rounded);
    if constexpr (kIsInt4<Value>) {
        std::int32_t total = 0;
        for (int i = 0; i < count; ++i) total += rounded[i];
        query->centres += sum(centres);
        query->centre_sum = kInt4Centre * static_cast<float>(total);
    }
}

// Adds the biases of a tile's positions to the scores of some queries.
void add_biases(Query* queries, int count, std::int64_t start) {
    for (int q = 0; q < count; ++q) {
        const float* biases = queries[q].biases + start;
        for (int i = 0; i < kAttentionTile; i += kLanes) {
            store(queries[q].scores + i, load(queries[q].scores + i) + load(biases + i));
        }
    }
}

// Turns the scores of a tile into weights, and rescales the sums of kCount queries. Weights of unseen tokens are zero,
// even if their scores are NaN.
template <int kCount, typename Value>
void weigh(Query* queries, float soft_cap, int num_values) {
    using Each = Step<Value>;
    Floats scores[kCount][kGroups];
    float now[kCount];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        const Query& query = queries[q];
        const bool sees_all = query.first == 0 && query.end == kAttentionTile;
        Floats highest = broadcast(kNothing);
        QUIRE_UNROLLED for (int g = 0; g < kGroups; ++g) {
            Floats score = load(query.scores + g * kLanes);
            if (soft_cap > 0.0F) score = broadcast(soft_cap) * tanh(score / broadcast(soft_cap));
            if (!sees_all) {
                const Mask seen = lanes_between(query.first - g * kLanes, query.end - g * kLanes);
                score = select(seen, score, broadcast(kNothing));
            }
            scores[q][g] = score;
            highest = max(highest, score);
        }
        const float in_tile = quire::QUIRE_ISA::highest(highest);
        now[q] = query.highest < in_tile ? in_tile : query.highest;
    }
    Floats totals[kCount];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) totals[q] = broadcast(0.0F);
    QUIRE_UNROLLED for (int g = 0; g < kGroups; ++g) {
        QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
            Floats weights = exp(scores[q][g] - broadcast(now[q]));
            if constexpr (!kIsWhole<Value>) weights = Each::rounded(weights);
            store(queries[q].scores + g * kLanes, weights);
            totals[q] = totals[q] + weights;
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        Query& query = queries[q];
        if (query.highest != now[q]) {  // else it would be multiplied by 1
            const Floats rescale = exp(broadcast(query.highest - now[q]));
            query.total *= rescale.part[0][0];
            if constexpr (kIsInt4<Value>) query.centres *= rescale.part[0][0];
            query.highest = now[q];
            for (int d = 0; d < num_values; d += kLanes) store(query.sums + d, load(query.sums + d) * rescale);
        }
        query.total = query.total + sum(totals[q]);
        if constexpr (!kIsWhole<Value>) {
            Each::inputs(query.scores, kAttentionTile, reinterpret_cast<typename Each::Input*>(query.scores));
        }
    }
}

// Adds the weighted values of some steps of tokens to the sums of kCount queries, kWide vectors of them.
// For steps that a query sees only in part, kCount must be 1, except with int8.
template <int kCount, int kWide, typename Value>
void add_wide(Query* queries, const Part<Value>& part, int first_step, int end_step, int value_stride, int d) {
    using Each = Step<Value>;
    constexpr int kLineNumbers = kLineBytes / sizeof(Value), kStepNumbers = kLanes * Each::kInputs;
    constexpr int kGroupSteps = kLanes / Each::kInputs;
    // The weights of a query follow those of the previous query: an index is a constant, and needs no register.
    constexpr int kOfQuery = kAttentionTile * sizeof(float) / sizeof(typename Each::Input);
    const typename Each::Input* weights = reinterpret_cast<const typename Each::Input*>(queries[0].scores);
    typename Each::Sum sums[kCount][kWide];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
            if constexpr (kIsInt8<Value>) {
                sums[q][w] = typename Each::Sum{};
            } else {
                sums[q][w] = Each::sum_from(load(queries[q].sums + d + w * kLanes));
            }
        }
    }
    for (int step = first_step; step < end_step;) {
        const int group = step / kGroupSteps, end_of_group = least((group + 1) * kGroupSteps, end_step);
        std::size_t at = (static_cast<std::size_t>(step % kGroupSteps) * value_stride + d) * Each::kInputs;
        for (; step < end_of_group; ++step, at += static_cast<std::size_t>(value_stride) * Each::kInputs) {
            typename Each::Vector values[kWide];
            QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
                values[w] = Each::weights(part.numbers[group] + at + w * kStepNumbers);
                if constexpr (kCount == 1 && !kIsInt8<Value>) {
                    const int place = step * Each::kInputs;
                    values[w] = Each::between(values[w], queries[0].first - place, queries[0].end - place);
                }
            }
            const char* next = part.next[group] + at * sizeof(Value);
            for (int i = 0; i < kWide * kStepNumbers; i += kLineNumbers) prefetch(next + i * sizeof(Value));
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                const auto weight = Each::input(weights + q * kOfQuery + step);
                QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) sums[q][w] = Each::add(sums[q][w], weight, values[w]);
            }
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
            float* to = queries[q].sums + d + w * kLanes;
            if constexpr (kIsInt8<Value>) {
                store(to, fma(to_floats(sums[q][w]), broadcast(queries[q].weight_scale), load(to)));
            } else {
                store(to, to_floats(sums[q][w]));
            }
        }
    }
}

// The layout of values: the numbers of a token, and how many of them count.
struct ValueRows {
    int stride;
    int count;
};

// Adds the weighted values of some steps of tokens to the sums of kCount queries.
template <int kCount, typename Value>
void add_values(Query* queries, const Part<Value>& part, int first_step, int end_step, ValueRows rows) {
    if (first_step >= end_step) return;
    constexpr int kLeast = kIsInt4<Value> ? 2 : 1, kMost = least(kSums / kCount, 8);
    constexpr int kWide = kMost < kLeast ? kLeast : kMost;
    int d = 0;
    for (; d + kWide * kLanes <= rows.count; d += kWide * kLanes) {
        add_wide<kCount, kWide>(queries, part, first_step, end_step, rows.stride, d);
    }
    for (; d < rows.count; d += kLeast * kLanes) {
        add_wide<kCount, kLeast>(queries, part, first_step, end_step, rows.stride, d);
    }
}

// Adds the values of some groups for kCount queries that all see a part of the tile. The queries are in the order of
// their positions, and so are the first and last tokens that they see. Steps that all queries see in full are computed
// together, the steps before and after for one query at a time. With integers all steps are computed together: a weight
// of zero adds nothing to their sums.
template <int kCount, typename Value>
void add_part(Query* queries, const Part<Value>& part, ValueRows rows) {
    constexpr int kInputs = kIsInt4<Value> ? kInt4Tokens : Step<Value>::kInputs, kGroupSteps = kLanes / kInputs;
    const int first_step = part.first * kGroupSteps, end_step = part.end * kGroupSteps;
    const auto within = [&](int step) { return step < first_step ? first_step : least(step, end_step); };
    const int first = queries[0].first, end = queries[kCount - 1].end;
    if constexpr (kIsWhole<Value>) {
        add_values<kCount>(queries, part, first / kInputs, pieces_of(end, kInputs), rows);
        return;
    }
    int all_first = within(pieces_of(queries[kCount - 1].first, kInputs)), all_end = within(queries[0].end / kInputs);
    if (kCount == 1 || all_first >= all_end) all_first = all_end = end_step;
    const auto add_alone = [&](int q, int from, int to) {
        from = from < queries[q].first / kInputs ? queries[q].first / kInputs : from;
        add_values<1>(queries + q, part, from, least(to, pieces_of(queries[q].end, kInputs)), rows);
    };
    for (int q = 0; q < kCount; ++q) add_alone(q, first_step, all_first);
    add_values<kCount>(queries, part, all_first, all_end, rows);
    for (int q = 0; q < kCount; ++q) add_alone(q, all_end, end_step);
}

std::int64_t first_seen(const AttentionTask& task, std::int64_t position) {
    if (task.window == 0 || position < task.window) return 0;
    return task.chunked ? position - position % task.window : position - task.window + 1;
}

std::int64_t end_seen(const AttentionTask& task, std::int64_t position) {
    if (task.end == 0) return position + 1;
    const std::int64_t ahead = task.window_ahead;
    return ahead == 0 || task.end - position < ahead ? task.end : position + ahead;
}

template <int kCount>
using Count = std::integral_constant<int, kCount>;

// Calls work(queries, their number) for eight queries at a time, then for four, two and one.
template <typename Work>
void for_some(Query* queries, int count, Work work) {
    int q = 0;
    if constexpr (kSums >= 16) {
        for (; q + 8 <= count; q += 8) work(queries + q, Count<8>());
    }
    for (; q + 4 <= count; q += 4) work(queries + q, Count<4>());
    for (; q + 2 <= count; q += 2) work(queries + q, Count<2>());
    if (q < count) work(queries + q, Count<1>());
}

// Sets the positions of a tile that each query sees; returns the range of the queries that see any.
std::pair<int, int> look(const AttentionTask& task, Query* queries, int count, std::int64_t start) {
    int low = count, high = 0;
    for (int q = 0; q < count; ++q) {
        Query& query = queries[q];
        const std::int64_t seen = first_seen(task, query.position);
        query.first =
            seen > start ? (seen - start < kAttentionTile ? static_cast<int>(seen - start) : kAttentionTile) : 0;
        const std::int64_t end = end_seen(task, query.position) - start;
        query.end = end < 0 ? 0 : end < kAttentionTile ? static_cast<int>(end) : kAttentionTile;
        if (query.first < query.end) {
            low = q < low ? q : low;
            high = q + 1;
        }
    }
    return {low, high};
}

// Computes one tile for queries that all see some tokens there: `count` of each head, those of the next head `stride`
// later.
template <typename Key, typename Value>
void attend_tile(const AttentionTask& task, Query* queries, int count, int stride, const Tile<Key, Value>& tile,
                 const Tile<Key, Value>& coming) {
    // Two groups keep the processor busy, unless there are four queries. Sums of integers run over the entire tile at
    // once.
    const int keys_at_once = count % 8 >= 4 ? kGroups : 2;
    const int values_at_once = kIsWhole<Value> || task.num_kv_heads == 1 ? kGroups : 2;
    const int value_stride = task.kv.value_stride();
    const ValueRows rows{value_stride, kIsInRows<Key> ? task.kv.latent_dim : value_stride};
    for (int group = tile.first(); group < tile.end(); group += keys_at_once) {
        for (int head = 0; head < task.num_kv_heads; ++head) {
            const auto part = tile.keys(head, group, least(group + keys_at_once, tile.end()));
            for_some(queries + head * stride, count,
                     [&](Query* some, auto number) { score<number.value>(some, part, task.kv); });
        }
    }
    if (task.distance_bias != nullptr) {
        for (int head = 0; head < task.num_kv_heads; ++head) add_biases(queries + head * stride, count, tile.start());
    }
    for (int head = 0; head < task.num_kv_heads; ++head) {
        Query* own = queries + head * stride;
        int q = 0;
        for (; q + 2 <= count; q += 2) {
            tile.fetch_values(head * count + q, 2);
            weigh<2, Value>(own + q, task.soft_cap, rows.count);
        }
        if (q < count) {
            tile.fetch_values(head * count + q, 1);
            weigh<1, Value>(own + q, task.soft_cap, rows.count);
        }
    }
    for (int group = tile.first(); group < tile.end(); group += values_at_once) {
        for (int head = 0; head < task.num_kv_heads; ++head) {
            const auto part = tile.values(head, group, least(group + values_at_once, tile.end()), coming);
            Query* own = queries + head * stride;
            if constexpr (kIsWhole<Value>) {
                for (int q = 0; q < count; ++q) round_weights(own + q, part);
            }
            for_some(own, count, [&](Query* some, auto number) { add_part<number.value>(some, part, rows); });
        }
    }
}

// Computes the tiles of positions `begin` … `limit` - 1, where a tile begins at `begin`. Each head has `count`
// queries, at the same positions; the queries of the next head follow `stride` later.
template <typename Key, typename Value>
void attend(const AttentionTask& task, Query* queries, int count, int stride, std::int64_t begin, std::int64_t limit) {
    std::int64_t start = first_seen(task, queries[0].position) / kAttentionTile * kAttentionTile;
    start = start < begin ? begin : start;
    const auto tile_at = [&](std::int64_t place) {
        const std::int64_t left = limit - place;
        return Tile<Key, Value>(task, place, 0,
                                left < 0                ? 0
                                : left < kAttentionTile ? static_cast<int>(left)
                                                        : kAttentionTile);
    };
    for (; start < limit; start += kAttentionTile) {
        int low = 0, high = 0;
        for (int head = 0; head < task.num_kv_heads; ++head) {
            std::tie(low, high) = look(task, queries + head * stride, count, start);
        }
        if (low >= high) continue;
        const Tile<Key, Value> tile(task, start, queries[low].first, queries[high - 1].end);
        attend_tile(task, queries + low, high - low, stride, tile, tile_at(start + kAttentionTile));
    }
}

// The queries of a task, before they have seen any token.
template <typename Key, typename Value>
class Queries {
  public:
    Queries(const AttentionTask& task, float* scratch) : task_(task), scratch_(scratch) {}

    // Adds some query heads of one token and key-value head.
    void add(int kv_head, int token, std::int64_t position, int first_head, int num_heads) {
        const int head_dim = task_.kv.head_dim, value_stride = task_.kv.value_stride();
        for (int head = first_head; head < first_head + num_heads; ++head, ++count_) {
            const std::size_t of_all = static_cast<std::size_t>((task_.kv_head + kv_head) * task_.group + head);
            const std::size_t column = of_all * head_dim;
            float* scores = scratch_ + static_cast<std::size_t>(count_) * kAttentionTile;
            float* own =
                scratch_ + kAttentionQueries * kAttentionTile + static_cast<std::size_t>(count_) * 2 * value_stride;
            const float* row = task_.query.row(token) + column;
            if constexpr (kIsInt4<Key>) {
                std::memcpy(own, row, head_dim * sizeof(float));
                rotate_head(own, head_dim);
                row = own;
            }
            Input* rounded = reinterpret_cast<Input*>(own + value_stride);
            const float* biases = nullptr;
            if (task_.distance_bias != nullptr) biases = task_.distance_bias + of_all * task_.num_distances - position;
            float scale = task_.scale;
            queries_[count_] = {.vector = rounded_vector(row, head_dim, rounded, &scale),
                                .scores = scores,
                                .sums = own,
                                .output = task_.output.row(token) + of_all * task_.kv.value_dim(),
                                .position = position,
                                .biases = biases,
                                .sink = task_.sinks == nullptr ? kNothing : task_.sinks[of_all],
                                .score_scale = scale,
                                .weight_scale = 0.0F,
                                .centres = 0.0F,
                                .centre_sum = 0.0F,
                                .highest = kNothing,
                                .total = 0.0F,
                                .first = 0,
                                .end = 0};
            for (int d = 0; d < value_stride; ++d) own[d] = 0.0F;
        }
    }

    // Divides by the sum of weights. A sink is added here, once, after all tiles: so its place in the sum does not
    // depend on how the tiles were divided.
    void finish() {
        for (int q = 0; q < count_; ++q) {
            Query& query = queries_[q];
            if (query.sink != kNothing) query.total += exp(broadcast(query.sink - query.highest)).part[0][0];
            const int value_dim = task_.kv.value_dim();
            if constexpr (kIsInt4<Value>) {
                for (int d = 0; d < value_dim; ++d) query.output[d] = (query.sums[d] + query.centres) / query.total;
                rotate_head(query.output, value_dim);
            } else {
                for (int d = 0; d < value_dim; ++d) query.output[d] = query.sums[d] / query.total;
            }
        }
        count_ = 0;
    }

    Query* all() { return queries_; }

  private:
    using Input = typename Step<Key>::Input;

    // Returns a query in the form that steps need; multiplies `scale` by the scale of its rounded numbers.
    static const Input* rounded_vector(const float* row, int head_dim, Input* scratch, float* scale) {
        if constexpr (kIsWhole<Key>) {
            std::int16_t* rounded = reinterpret_cast<std::int16_t*>(scratch);
            const Quantizer quantizer = quantizer_of(highest_size(row, head_dim), kMostInput);
            if constexpr (kIsInt4<Key>) std::memset(rounded, 0, round_up(head_dim, kInt4Group) * sizeof(std::int16_t));
            quantize(row, head_dim, quantizer.factor, rounded);
            if constexpr (kIsInt4<Key>) append_group_sums(rounded, round_up(head_dim, kInt4Group));
            *scale *= quantizer.scale;
            return scratch;
        } else {
            return Step<Key>::inputs(row, head_dim, scratch);
        }
    }

    // Writes the sum of each group of numbers after the last one.
    static void append_group_sums(std::int16_t* numbers, int count) {
        float* sums = reinterpret_cast<float*>(numbers + count);
        for (int start = 0; start < count; start += kInt4Group) {
            int sum = 0;
            for (int i = 0; i < kInt4Group; ++i) sum += numbers[start + i];
            sums[start / kInt4Group] = static_cast<float>(sum);
        }
    }

    const AttentionTask& task_;
    float* scratch_;
    Query queries_[kAttentionQueries];
    int count_ = 0;
};

// Computes as many complete tokens at a time as fit into kAttentionQueries, and the heads of a wide group in
// parts.
template <typename Key, typename Value>
void attend_sequence(const AttentionTask& task, float* scratch) {
    Queries<Key, Value> queries(task, scratch);
    const int end_of_group = task.first_in_group + task.heads_in_group();
    const int heads_at_once = least(task.heads_in_group(), kAttentionQueries);
    const int tokens_at_once = kAttentionQueries / (heads_at_once * task.num_kv_heads);
    for (int token = 0; token < task.num_tokens; token += tokens_at_once) {
        const int end = least(task.num_tokens, token + tokens_at_once);
        for (int head = task.first_in_group; head < end_of_group; head += heads_at_once) {
            const int num_heads = least(heads_at_once, end_of_group - head), count = (end - token) * num_heads;
            for (int kv_head = 0; kv_head < task.num_kv_heads; ++kv_head) {
                for (int t = token; t < end; ++t) {
                    queries.add(kv_head, task.first_token + t, task.first_position + t, head, num_heads);
                }
            }
            const std::int64_t limit = end_seen(task, task.first_position + end - 1);
            attend<Key, Value>(task, queries.all(), count, count, 0, limit);
            queries.finish();
        }
    }
}

// Computes the shared positions first, for all sequences together; then each sequence alone.
template <typename Key, typename Value>
void attend_members(const AttentionTask& task, float* scratch) {
    Queries<Key, Value> queries(task, scratch);
    const int count = task.heads_in_group(), of_a_head = task.num_members * count;
    for (int kv_head = 0; kv_head < task.num_kv_heads; ++kv_head) {
        for (int m = 0; m < task.num_members; ++m) {
            queries.add(kv_head, task.members[m].token, task.members[m].position, task.first_in_group, count);
        }
    }
    attend<Key, Value>(task, queries.all(), of_a_head, of_a_head, 0, task.shared);
    AttentionTask own = task;
    for (int m = 0; m < task.num_members; ++m) {
        own.block_table = task.members[m].block_table;
        Query* first = queries.all() + m * count;
        attend<Key, Value>(own, first, count, of_a_head, task.shared, task.members[m].position + 1);
    }
    queries.finish();
}

template <typename Key, typename Value>
void attention_of(const AttentionTask& task, float* scratch) {
    if (task.num_members > 0) {
        attend_members<Key, Value>(task, scratch);
    } else {
        attend_sequence<Key, Value>(task, scratch);
    }
}

}  // namespace

void attention(const AttentionTask& task, float* scratch) {
    if (task.kv.latent_dim > 0) {
        if (task.kv.type == KvType::kFloat32) return attention_of<InRows<float>, float>(task, scratch);
        return attention_of<InRows<std::uint16_t>, std::uint16_t>(task, scratch);
    }
    switch (task.kv.type) {
        case KvType::kFloat32:
            return attention_of<float, float>(task, scratch);
        case KvType::kBfloat16:
            return attention_of<std::uint16_t, std::uint16_t>(task, scratch);
        case KvType::kInt8:
            return attention_of<CachedInt8, CachedInt8>(task, scratch);
        case KvType::kK8V4:
            return attention_of<CachedInt8, CachedInt4>(task, scratch);
        case KvType::kInt4:
            return attention_of<CachedInt4, CachedInt4>(task, scratch);
    }
}

}  // namespace quire::QUIRE_ISA
