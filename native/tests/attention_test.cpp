// Compares paged attention with an oracle in double precision. Then pages, cuts and joins the same work in
// every way and compares bits. Unwritten memory holds NaN. Prints each failure, and exits with 1 after a failure.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "quire/kernels.h"
#include "testing.h"

namespace {

using quire::AttentionTask;
using quire::kAttentionTokens;
using quire::Kernels;
using quire::KvType;
using quire::PagedKv;
using quire::testing::expect;
using quire::testing::Random;
using quire::testing::same_bits;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kNumKvHeads = 2;
constexpr int kLongest = 130;
constexpr KvType kTypes[] = {KvType::kFloat32, KvType::kBfloat16, KvType::kInt8, KvType::kK8V4, KvType::kInt4};
constexpr int kLengths[] = {1, 15, 16, 17, 63, 64, 65, 130};
constexpr int kBlockSizes[] = {16, 32, 64, 128};

struct Shape {
    int head_dim, group;
    KvType type;
};

// The options that change scores.
struct Bend {
    std::int64_t window;
    float soft_cap;
    bool sinks = false;
    bool biases = false;
};

constexpr Bend kBends[] = {{0, 0.0F},
                           {1, 0.0F},
                           {17, 2.0F},
                           {64, 0.0F},
                           {100, 0.0F},
                           {0, 5.0F},
                           {0, 0.0F, true},
                           {17, 2.0F, true},
                           {0, 2.0F, false, true},
                           {17, 0.0F, true, true}};

// Sinks for the largest number of heads in any shape; some are far above all scores, and some far below.
std::vector<float> make_sinks() {
    Random random(11);
    std::vector<float> sinks = random.numbers(kNumKvHeads * quire::kAttentionQueries, -4.0F, 8.0F);
    sinks[1] = 300.0F;
    sinks[2] = -300.0F;
    return sinks;
}

const std::vector<float> kSinks = make_sinks();

// Biases by distance of as many heads: those of positions that no query sees are NaN.
constexpr int kNumDistances = 2 * kLongest + quire::kAttentionTile;

std::vector<float> make_biases() {
    Random random(12);
    std::vector<float> biases = random.numbers(
        static_cast<std::size_t>(kNumKvHeads) * (quire::kAttentionQueries + 7) * kNumDistances, -4.0F, 4.0F);
    for (std::size_t i = 0; i < biases.size(); ++i) {
        if (static_cast<int>(i % kNumDistances) > kLongest) biases[i] = kNan;
    }
    return biases;
}

const std::vector<float> kBiases = make_biases();

// Queries, keys and values of the longest sequence; shorter sequences are its prefixes.
struct Sequence {
    Sequence(const Shape& shape, std::uint64_t seed) : shape(shape) {
        Random random(seed);
        queries = random.numbers(static_cast<std::size_t>(kLongest) * query_width(), -3.0F, 3.0F);
        keys = random.numbers(static_cast<std::size_t>(kLongest) * kv_width(), -3.0F, 3.0F);
        values = random.numbers(static_cast<std::size_t>(kLongest) * kv_width());
    }

    int query_width() const { return kNumKvHeads * shape.group * shape.head_dim; }
    int kv_width() const { return kNumKvHeads * shape.head_dim; }

    std::vector<double> stored_keys() const {
        return shape.type == KvType::kInt4 ? as_int4(keys, quire::kInt4Group) : stored(keys);
    }
    std::vector<double> stored_values() const {
        return has_int4_values() ? as_int4(values, shape.head_dim) : stored(values);
    }

    // Queries, keys or values as the KV memory stores numbers of more than 4 bits.
    std::vector<double> stored(const std::vector<float>& numbers) const {
        std::vector<double> result(numbers.begin(), numbers.end());
        if (shape.type == KvType::kBfloat16) {
            for (double& number : result) {
                number = quire::testing::from_bfloat16(quire::testing::nearest_bfloat16(static_cast<float>(number)));
            }
        } else if (shape.type != KvType::kFloat32) {
            for_heads(numbers, [&](std::size_t start, const std::vector<float>& head) {
                const quire::testing::Quantized quantized(head);
                for (int d = 0; d < shape.head_dim; ++d) {
                    result[start + d] = quantized.q[d] * static_cast<double>(quantized.scale);
                }
            });
        }
        return result;
    }

    Shape shape;
    std::vector<float> queries, keys, values;

  private:
    bool has_int4_values() const { return shape.type == KvType::kK8V4 || shape.type == KvType::kInt4; }

    std::vector<double> as_int4(const std::vector<float>& numbers, int group) const {
        std::vector<double> result;
        for_heads(numbers, [&](std::size_t, const std::vector<float>& head) {
            const std::vector<double> restored = quire::testing::Int4Head(head, group).restored(group);
            result.insert(result.end(), restored.begin(), restored.end());
        });
        return result;
    }

    template <typename Work>
    void for_heads(const std::vector<float>& numbers, Work work) const {
        for (std::size_t start = 0; start < numbers.size(); start += shape.head_dim) {
            work(start, {numbers.begin() + start, numbers.begin() + start + shape.head_dim});
        }
    }
};

float scale_of(const Shape& shape) { return 1.0F / std::sqrt(static_cast<float>(shape.head_dim)); }

// KV memory with the blocks of one sequence scattered over it; nothing else is written.
class Cache {
  public:
    Cache(const Kernels& kernels, const Sequence& sequence, int block_size, int length) : kernels_(kernels) {
        const int num_used = (length + block_size - 1) / block_size, num_blocks = num_used + 2;
        const Shape& shape = sequence.shape;
        kv_.type = shape.type;
        kv_.num_kv_heads = kNumKvHeads;
        kv_.block_size = block_size;
        kv_.head_dim = shape.head_dim;
        // All ones are NaN in both float types, and in scales.
        const std::size_t num_tokens = static_cast<std::size_t>(num_blocks) * kNumKvHeads * block_size;
        keys_.assign(num_tokens * kv_.key_bytes(), 0xff);
        values_.assign(num_tokens * kv_.value_bytes(), 0xff);
        kv_.keys = keys_.data();
        kv_.values = values_.data();
        std::vector<std::int64_t> blocks(num_blocks);
        for (int i = 0; i < num_blocks; ++i) blocks[i] = i;
        Random random(block_size);
        random.shuffle(blocks);
        table_.assign(blocks.begin(), blocks.begin() + num_used);
        for (int position = 0; position < length; ++position) {
            for (int head = 0; head < kNumKvHeads; ++head) {
                const std::size_t start =
                    static_cast<std::size_t>(position) * sequence.kv_width() + head * shape.head_dim;
                write(position, head, sequence.keys.data() + start, sequence.values.data() + start);
            }
        }
    }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    void write(int position, int head, const float* key, const float* value) {
        const std::int64_t slot = table_[position / kv_.block_size] * kv_.block_size + position % kv_.block_size;
        kernels_.write_kv(kv_, slot, head, key, value);
    }

    const PagedKv& kv() const { return kv_; }
    const std::int64_t* table() const { return table_.data(); }

  private:
    const Kernels& kernels_;
    PagedKv kv_;
    std::vector<std::uint8_t> keys_, values_;
    std::vector<std::int64_t> table_;
};

void bias(const Bend& bend, AttentionTask& task) {
    task.distance_bias = bend.biases ? kBiases.data() + kLongest : nullptr;
    task.num_distances = kNumDistances;
}

// The attention of positions first … end - 1, `tokens_at_once` in each task, as rows of query_width. With
// `heads_together`, a task has all heads if their queries fit.
std::vector<float> attend(const Kernels& kernels, const Sequence& sequence, const Cache& cache, const Bend& bend,
                          int first, int end, int tokens_at_once, bool heads_together = false) {
    const int num_queries = tokens_at_once * sequence.shape.group * kNumKvHeads;
    const int heads_at_once = heads_together && num_queries <= quire::kAttentionQueries ? kNumKvHeads : 1;
    const int width = sequence.query_width(), head_dim = sequence.shape.head_dim;
    std::vector<float> output(static_cast<std::size_t>(end - first) * width, kNan);
    std::vector<float> scratch(quire::attention_scratch(head_dim), kNan);
    for (int token = 0; token < end - first; token += tokens_at_once) {
        for (int head = 0; head < kNumKvHeads; head += heads_at_once) {
            AttentionTask task;
            task.num_kv_heads = heads_at_once;
            task.kv = cache.kv();
            task.block_table = cache.table();
            task.query = {const_cast<float*>(sequence.queries.data()) + static_cast<std::size_t>(first) * width, width};
            task.output = {output.data(), width};
            task.first_token = token;
            task.num_tokens = std::min(tokens_at_once, end - first - token);
            task.first_position = first + token;
            task.kv_head = head;
            task.group = sequence.shape.group;
            task.scale = scale_of(sequence.shape);
            task.window = bend.window;
            task.soft_cap = bend.soft_cap;
            task.sinks = bend.sinks ? kSinks.data() : nullptr;
            bias(bend, task);
            kernels.attention(task, scratch.data());
        }
    }
    return output;
}

// The plain softmax over all visible positions, in double.
class Oracle {
  public:
    // With `rounds`, queries are rounded like keys.
    Oracle(const Sequence& sequence, bool rounds)
        : sequence_(sequence),
          queries_(sequence.queries.begin(), sequence.queries.end()),
          keys_(sequence.stored_keys()),
          values_(sequence.stored_values()) {
        if (rounds) queries_ = sequence.stored(sequence.queries);
    }

    // The output of one query head at one position, [head_dim].
    std::vector<double> attend(int position, int query_head, const Bend& bend) const {
        const Shape& shape = sequence_.shape;
        const int first = bend.window == 0 ? 0 : std::max(0, static_cast<int>(position + 1 - bend.window)),
                  end = position + 1;
        const std::size_t column = static_cast<std::size_t>(query_head / shape.group) * shape.head_dim;
        const double* query = queries_.data() + static_cast<std::size_t>(position) * sequence_.query_width() +
                              query_head * shape.head_dim;
        std::vector<double> weights;
        for (int other = first; other < end; ++other) {
            const double* key = keys_.data() + static_cast<std::size_t>(other) * sequence_.kv_width() + column;
            double score = 0.0;
            for (int d = 0; d < shape.head_dim; ++d) score += query[d] * key[d];
            score *= scale_of(shape);
            if (bend.biases) score += kBiases[query_head * kNumDistances + kLongest + other - position];
            weights.push_back(bend.soft_cap == 0.0F ? score : bend.soft_cap * std::tanh(score / bend.soft_cap));
        }
        double highest = *std::max_element(weights.begin(), weights.end());
        const double sink = bend.sinks ? kSinks[query_head] : -INFINITY;
        highest = std::max(highest, sink);
        double total = std::exp(sink - highest);
        for (double& weight : weights) total += weight = std::exp(weight - highest);
        std::vector<double> output(shape.head_dim, 0.0);
        for (int other = first; other < end; ++other) {
            const double* value = values_.data() + static_cast<std::size_t>(other) * sequence_.kv_width() + column;
            for (int d = 0; d < shape.head_dim; ++d) output[d] += weights[other - first] / total * value[d];
        }
        return output;
    }

  private:
    const Sequence& sequence_;
    std::vector<double> queries_, keys_, values_;
};

// The oracle's rows for all positions.
std::vector<double> oracle_rows(const Oracle& oracle, const Shape& shape, const Bend& bend) {
    std::vector<double> rows;
    for (int position = 0; position < kLongest; ++position) {
        for (int head = 0; head < kNumKvHeads * shape.group; ++head) {
            const std::vector<double> output = oracle.attend(position, head, bend);
            rows.insert(rows.end(), output.begin(), output.end());
        }
    }
    return rows;
}

// Values are at most 1, so the error comes from the scores, which are below 30, and from one sum. If
// pairs are multiplied, each weight is rounded by up to 1 / 512, and so is their sum. With whole numbers, queries
// and weights are rounded to 1 / 16383 of the highest.
struct Tolerance {
    double worst, mean;
};

Tolerance tolerance_of(const Kernels& kernels, KvType type) {
    if (quire::testing::multiplies_pairs(kernels, type)) return {2.0 / 512, 0.25 / 512};
    if (type == KvType::kFloat32 || type == KvType::kBfloat16) return {1e-5, 1e-5};
    if (type == KvType::kInt8) return {8.0 / 16383, 1.0 / 16383};
    return {16.0 / 16383, 2.0 / 16383};  // a rotated value may be larger
}

void expect_near(const Kernels& kernels, const Sequence& sequence, const Bend& bend, const std::vector<float>& rows,
                 const std::vector<double>& expected) {
    const Tolerance tolerance = tolerance_of(kernels, sequence.shape.type);
    double worst = 0.0, squares = 0.0;
    std::size_t where = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const double error = std::fabs(rows[i] - expected[i]);
        squares += error * error;
        if (!(error <= worst)) {
            worst = error;
            where = i;
            if (std::isnan(error)) break;
        }
    }
    const int width = sequence.query_width();
    expect(std::sqrt(squares / rows.size()) <= tolerance.mean,
           "%s %s: head_dim %d, group %d, window %d, cap %g: mean error %g", kernels.name,
           quire::testing::name_of(sequence.shape.type), sequence.shape.head_dim, sequence.shape.group,
           static_cast<int>(bend.window), bend.soft_cap, std::sqrt(squares / rows.size()));
    expect(worst <= tolerance.worst,
           "%s %s: head_dim %d, group %d, window %d, cap %g: position %d, column %d is %g, not %g", kernels.name,
           quire::testing::name_of(sequence.shape.type), sequence.shape.head_dim, sequence.shape.group,
           static_cast<int>(bend.window), bend.soft_cap, static_cast<int>(where / width),
           static_cast<int>(where % width), rows[where], expected[where]);
}

// Compares every position of one shape with the oracle, then the bits of every length, block size and cut.
void test_shape(const Shape& shape) {
    const Sequence sequence(shape, static_cast<std::uint64_t>(shape.head_dim * 100 + shape.group));
    // Alternating halves of the bends for each shape, because the oracle is slow.
    std::vector<Bend> bends;
    for (std::size_t i = (shape.head_dim / 8 + shape.group / 2) % 2; i < std::size(kBends); i += 2) {
        bends.push_back(kBends[i]);
    }
    std::vector<std::vector<double>> expected_by_rounding[2];
    quire::testing::for_each_kernels([&](const Kernels& kernels) {
        const bool rounds = quire::testing::multiplies_pairs(kernels, shape.type);
        std::vector<std::vector<double>>& expected = expected_by_rounding[rounds];
        if (expected.empty()) {
            const Oracle oracle(sequence, rounds);
            for (const Bend& bend : bends) expected.push_back(oracle_rows(oracle, shape, bend));
        }
        std::vector<std::vector<float>> rows;
        {
            const Cache cache(kernels, sequence, 16, kLongest);
            for (std::size_t i = 0; i < bends.size(); ++i) {
                rows.push_back(attend(kernels, sequence, cache, bends[i], 0, kLongest, 1));
                expect_near(kernels, sequence, bends[i], rows[i], expected[i]);
            }
        }
        for (const int block_size : kBlockSizes) {
            for (const int length : kLengths) {
                const Cache cache(kernels, sequence, block_size, length);
                // Cuts and bends alternate: every pair is tried with some length and block size.
                const int at_once = 1 + (length + block_size / 16 * 5 + shape.head_dim) % kAttentionTokens;
                for (std::size_t i = 0; i < bends.size(); ++i) {
                    const int first = std::max(0, length - 20);
                    const bool together = (length + block_size / 16) % 2 == 0;
                    const std::vector<float> last =
                        attend(kernels, sequence, cache, bends[i], first, length, at_once, together);
                    expect(same_bits(last.data(),
                                     rows[i].data() + static_cast<std::size_t>(first) * sequence.query_width(),
                                     last.size()),
                           "%s %s: head_dim %d, group %d, window %d, cap %g: bits change with length %d, "
                           "blocks of %d, %d tokens at once",
                           kernels.name, quire::testing::name_of(shape.type), shape.head_dim, shape.group,
                           static_cast<int>(bends[i].window), bends[i].soft_cap, length, block_size, at_once);
                }
            }
        }
    });
}

// Tries every number of tokens in a task, from every start.
void test_cuts(const Kernels& kernels, KvType type, int group) {
    const Sequence sequence({.head_dim = 24, .group = group, .type = type}, 7);
    const Cache cache(kernels, sequence, 32, kLongest);
    for (const Bend& bend : kBends) {
        const std::vector<float> one_by_one = attend(kernels, sequence, cache, bend, 0, kLongest, 1);
        for (int at_once = 2; at_once <= kAttentionTokens; ++at_once) {
            for (const int first : {0, 41}) {
                const std::vector<float> rows =
                    attend(kernels, sequence, cache, bend, first, kLongest, at_once, first == 41);
                expect(
                    same_bits(rows.data(), one_by_one.data() + static_cast<std::size_t>(first) * sequence.query_width(),
                              rows.size()),
                    "%s %s: group %d, window %d, cap %g: bits change with %d tokens at once from %d", kernels.name,
                    quire::testing::name_of(type), group, static_cast<int>(bend.window), bend.soft_cap, at_once, first);
            }
        }
    }
}

// Sequences that share their first blocks have the same bits together as alone. The sequences here also share
// the blocks after those, and end at different positions.
void test_members(const Kernels& kernels, KvType type, int group) {
    const Sequence sequence({.head_dim = 24, .group = group, .type = type}, 9);
    const Cache cache(kernels, sequence, 16, kLongest);
    const int width = sequence.query_width();
    for (const Bend& bend : {kBends[0], kBends[5], kBends[6], kBends[8]}) {
        const std::vector<float> alone = attend(kernels, sequence, cache, bend, 0, kLongest, 1);
        std::vector<quire::AttentionMember> members;
        for (const int position : {127, 128, 63, 100, 129, 64, 127}) {
            members.push_back({cache.table(), position, position});
            const int num_members = static_cast<int>(members.size());
            for (const std::int64_t shared : {64, 128}) {
                if (shared == 128 && num_members > 2) continue;  // the third sequence is shorter
                std::vector<float> output(alone.size(), kNan), scratch(quire::attention_scratch(24), kNan);
                const int heads_at_once =
                    num_members * group * kNumKvHeads <= quire::kAttentionQueries ? kNumKvHeads : 1;
                for (int head = 0; head < kNumKvHeads; head += heads_at_once) {
                    AttentionTask task;
                    task.num_kv_heads = heads_at_once;
                    task.kv = cache.kv();
                    task.block_table = cache.table();
                    task.query = {const_cast<float*>(sequence.queries.data()), width};
                    task.output = {output.data(), width};
                    task.members = members.data();
                    task.num_members = num_members;
                    task.shared = shared;
                    task.kv_head = head;
                    task.group = group;
                    task.scale = scale_of(sequence.shape);
                    task.soft_cap = bend.soft_cap;
                    task.sinks = bend.sinks ? kSinks.data() : nullptr;
                    bias(bend, task);
                    kernels.attention(task, scratch.data());
                }
                for (const quire::AttentionMember& member : members) {
                    const std::size_t row = static_cast<std::size_t>(member.token) * width;
                    expect(same_bits(output.data() + row, alone.data() + row, width),
                           "%s %s: group %d, cap %g: %d sequences that share %d positions: bits change at %d",
                           kernels.name, quire::testing::name_of(type), group, bend.soft_cap, num_members,
                           static_cast<int>(shared), member.token);
                }
            }
        }
    }
}

// A head has the same bits with its group and alone. A group may be wider than the queries that go through a tile
// together.
void test_groups(const Kernels& kernels, KvType type) {
    const int wide = quire::kAttentionQueries + 7;
    const Sequence sequence({.head_dim = 8, .group = wide, .type = type}, 8);
    const Cache cache(kernels, sequence, 64, kLongest);
    const Oracle oracle(sequence, quire::testing::multiplies_pairs(kernels, sequence.shape.type));
    const int first = 60, end = 70, width = sequence.query_width();
    const std::vector<float> rows = attend(kernels, sequence, cache, kBends[0], first, end, 10);
    std::vector<float> scratch(quire::attention_scratch(8)), alone(rows.size(), kNan);
    for (int head = 0; head < kNumKvHeads * wide; ++head) {
        const std::vector<double> expected = oracle.attend(end - 1, head, kBends[0]);
        const float* actual = rows.data() + static_cast<std::size_t>(end - 1 - first) * width + head * 8;
        for (int d = 0; d < 8; ++d) {
            const double tolerance = tolerance_of(kernels, type).worst;
            expect(std::fabs(actual[d] - expected[d]) <= tolerance, "%s: head %d of a wide group", kernels.name, head);
        }
        // A group of one reads its columns at kv_head * head_dim, so its rows begin that much earlier.
        const int kv_head = head / wide, shift = head * 8 - kv_head * 8;
        AttentionTask task;
        task.kv = cache.kv();
        task.block_table = cache.table();
        task.query = {const_cast<float*>(sequence.queries.data()) + static_cast<std::size_t>(first) * width + shift,
                      width};
        task.output = {alone.data() + shift, width};
        task.num_tokens = end - first;
        task.first_position = first;
        task.kv_head = kv_head;
        task.scale = scale_of(sequence.shape);
        kernels.attention(task, scratch.data());
    }
    expect(same_bits(rows, alone), "%s %s: a head alone and in its group", kernels.name, quire::testing::name_of(type));
}

// Scores that rise and fall by hundreds from tile to tile: the running sums are rescaled to nothing,
// or new weights vanish.
void test_steep_scores(const Kernels& kernels) {
    for (const float slope : {3.0F, -3.0F}) {
        Sequence sequence({.head_dim = 16, .group = 1, .type = KvType::kFloat32}, 9);
        for (int position = 0; position < kLongest; ++position) {
            for (int head = 0; head < kNumKvHeads; ++head) {
                const int start = position * sequence.kv_width() + head * 16;
                sequence.keys[start] = slope * static_cast<float>(position);
                sequence.queries[start] = 4.0F;
            }
        }
        const Oracle oracle(sequence, quire::testing::multiplies_pairs(kernels, sequence.shape.type));
        const Cache cache(kernels, sequence, 16, kLongest);
        const std::vector<float> rows = attend(kernels, sequence, cache, kBends[0], 0, kLongest, 16);
        const std::vector<double> expected = oracle_rows(oracle, sequence.shape, kBends[0]);
        double worst = 0.0;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const double error = std::fabs(rows[i] - expected[i]);
            if (!(error <= worst)) worst = error;
        }
        // The scores are up to 400, so they are known to some 1e-4.
        expect(worst <= 4e-4, "%s: slope %g: error %g", kernels.name, slope, worst);
    }
}

bool all_nan(const float* values, int count) {
    return std::all_of(values, values + count, [](float value) { return std::isnan(value); });
}

// A NaN in a key or a value that a query sees shows in its output; no other output changes.
void test_nan_shows(const Kernels& kernels, KvType type, const Bend& bend) {
    const Sequence sequence({.head_dim = 24, .group = 3, .type = type}, 10);
    const int width = sequence.query_width(), half = width / kNumKvHeads;
    const Cache untouched(kernels, sequence, 32, kLongest);
    const std::vector<float> clean = attend(kernels, sequence, untouched, bend, 0, kLongest, 16);
    for (const int bad : {0, 15, 16, 63, 64, 77, 129}) {
        for (const bool in_key : {true, false}) {
            Cache cache(kernels, sequence, 32, kLongest);
            const std::size_t start = static_cast<std::size_t>(bad) * sequence.kv_width() + 24;
            std::vector<float> key(sequence.keys.begin() + start, sequence.keys.begin() + start + 24);
            std::vector<float> value(sequence.values.begin() + start, sequence.values.begin() + start + 24);
            (in_key ? key : value)[5] = kNan;
            cache.write(bad, 1, key.data(), value.data());
            const std::vector<float> rows = attend(kernels, sequence, cache, bend, 0, kLongest, 16);
            for (int position = 0; position < kLongest; ++position) {
                const float* row = rows.data() + static_cast<std::size_t>(position) * width;
                const float* clean_row = clean.data() + static_cast<std::size_t>(position) * width;
                const bool sees = position >= bad && (bend.window == 0 || position - bad < bend.window);
                bool right = same_bits(row, clean_row, half);
                if (!sees) {
                    right &= same_bits(row, clean_row, width);
                } else if (in_key ||
                           (type != KvType::kFloat32 && type != KvType::kBfloat16)) {  // whose scale is NaN then
                    right &= all_nan(row + half, half);
                } else {
                    for (int i = half; i < width; ++i) right &= std::isnan(row[i]) == (i % 24 == 5);
                }
                expect(right, "%s %s: NaN in the %s of %d, window %d, cap %g: position %d", kernels.name,
                       quire::testing::name_of(type), in_key ? "key" : "value", bad, static_cast<int>(bend.window),
                       bend.soft_cap, position);
            }
        }
    }
}

// Stores one token and checks all of the memory: each number is at its place in kernels.h, padding
// dimensions are zero, and nothing else has changed.
template <typename Number>
void test_layout(const Kernels& kernels, KvType type, int head_dim, int block_size, Number untouched) {
    const int num_blocks = 3, block = 1, place = block_size - 3, head = 1;
    PagedKv kv;
    kv.type = type;
    kv.num_kv_heads = kNumKvHeads;
    kv.block_size = block_size;
    kv.head_dim = head_dim;
    const int stride = quire::round_up(head_dim, 16);
    const std::size_t head_size = static_cast<std::size_t>(block_size) * stride;
    std::vector<Number> keys(num_blocks * kNumKvHeads * head_size, untouched), values = keys;
    std::vector<Number> expected_keys = keys, expected_values = values;
    kv.keys = keys.data();
    kv.values = values.data();
    Random random(head_dim);
    const std::vector<float> key = random.numbers(head_dim), value = random.numbers(head_dim);
    const auto stored = [](float number) {
        if constexpr (sizeof(Number) == 2) {
            return quire::testing::nearest_bfloat16(number);
        } else {
            return number;
        }
    };
    const std::size_t start = (block * kNumKvHeads + head) * head_size;
    const int together = quire::testing::multiplies_pairs(kernels, type) ? 2 : 1;
    for (int d = 0; d < stride; ++d) {
        const int group = place / 16 * ((head_dim + together - 1) / together) + d / together;
        if (d < (head_dim + together - 1) / together * together) {
            expected_keys[start + (group * 16 + place % 16) * together + d % together] =
                d < head_dim ? stored(key[d]) : Number(0);
        }
        expected_values[start + static_cast<std::size_t>(place / together * stride + d) * together + place % together] =
            d < head_dim ? stored(value[d]) : Number(0);
    }
    kernels.write_kv(kv, block * block_size + place, head, key.data(), value.data());
    expect(keys == expected_keys, "%s %s: where keys lie, head_dim %d, blocks of %d", kernels.name,
           quire::testing::name_of(type), head_dim, block_size);
    expect(values == expected_values, "%s %s: where values lie, head_dim %d, blocks of %d", kernels.name,
           quire::testing::name_of(type), head_dim, block_size);
}

// The same with int8, with the scales after the numbers.
void test_int8_layout(const Kernels& kernels, int head_dim, int block_size) {
    const int num_blocks = 3, block = 1, place = block_size - 3, head = 1;
    const std::uint8_t untouched = 77;
    PagedKv kv;
    kv.type = KvType::kInt8;
    kv.num_kv_heads = kNumKvHeads;
    kv.block_size = block_size;
    kv.head_dim = head_dim;
    const int stride = quire::round_up(head_dim, 16);
    const std::size_t head_size = static_cast<std::size_t>(block_size) * (stride + sizeof(float));
    std::vector<std::uint8_t> keys(num_blocks * kNumKvHeads * head_size, untouched), values = keys;
    std::vector<std::uint8_t> expected_keys = keys, expected_values = values;
    kv.keys = keys.data();
    kv.values = values.data();
    Random random(head_dim);
    const std::vector<float> key = random.numbers(head_dim), value = random.numbers(head_dim, -30.0F, 30.0F);
    const quire::testing::Quantized stored_key(key), stored_value(value);
    const std::size_t start = (block * kNumKvHeads + head) * head_size;
    const auto byte = [&](const quire::testing::Quantized& row, int d) {
        return static_cast<std::uint8_t>(d < head_dim ? row.q[d] : 0);
    };
    for (int d = 0; d < stride; ++d) {
        const int group = place / 16 * ((head_dim + 1) / 2) + d / 2;
        if (d < (head_dim + 1) / 2 * 2)
            expected_keys[start + (group * 16 + place % 16) * 2 + d % 2] = byte(stored_key, d);
        expected_values[start + static_cast<std::size_t>(place / 2 * stride + d) * 2 + place % 2] =
            byte(stored_value, d);
    }
    const std::size_t scale = start + static_cast<std::size_t>(block_size) * stride + place * sizeof(float);
    std::memcpy(expected_keys.data() + scale, &stored_key.scale, sizeof(float));
    std::memcpy(expected_values.data() + scale, &stored_value.scale, sizeof(float));
    kernels.write_kv(kv, block * block_size + place, head, key.data(), value.data());
    expect(keys == expected_keys, "%s int8: where keys lie, head_dim %d, blocks of %d", kernels.name, head_dim,
           block_size);
    expect(values == expected_values, "%s int8: where values lie, head_dim %d, blocks of %d", kernels.name, head_dim,
           block_size);
}

// The same with 4-bit keys and values, with the scales and the minimums after the numbers.
void test_int4_layout(const Kernels& kernels, int head_dim, int block_size) {
    const int num_blocks = 3, block = 1, place = block_size - 3, head = 1;
    PagedKv kv;
    kv.type = KvType::kInt4;
    kv.num_kv_heads = kNumKvHeads;
    kv.block_size = block_size;
    kv.head_dim = head_dim;
    const int num_groups = head_dim / 32;
    const std::size_t numbers = static_cast<std::size_t>(block_size) * head_dim / 2;
    const std::size_t key_size = numbers + block_size * num_groups * 4, value_size = numbers + block_size * 4;
    std::vector<std::uint8_t> keys(num_blocks * kNumKvHeads * key_size, 77), expected_keys = keys;
    std::vector<std::uint8_t> values(num_blocks * kNumKvHeads * value_size, 77), expected_values = values;
    kv.keys = keys.data();
    kv.values = values.data();
    Random random(head_dim);
    const std::vector<float> key = random.numbers(head_dim), value = random.numbers(head_dim, -30.0F, 30.0F);
    const quire::testing::Int4Head stored_key(key, 32), stored_value(value, head_dim);
    std::uint8_t* of_key = expected_keys.data() + (block * kNumKvHeads + head) * key_size;
    std::uint8_t* of_value = expected_values.data() + (block * kNumKvHeads + head) * value_size;
    for (int d = 0; d < head_dim; d += 8) {
        std::uint8_t* to = of_key + ((place / 16 * (head_dim / 8) + d / 8) * 16 + place % 16) * 4;
        const int* n = stored_key.n.data() + d;
        to[0] = static_cast<std::uint8_t>(n[0] | n[2] << 4);
        to[1] = static_cast<std::uint8_t>(n[4] | n[6] << 4);
        to[2] = static_cast<std::uint8_t>(n[1] | n[3] << 4);
        to[3] = static_cast<std::uint8_t>(n[5] | n[7] << 4);
    }
    constexpr int kOrder[] = {0, 2, 1, 3};
    for (int d = 0; d < head_dim; d = d % 32 == 15 ? d + 17 : d + 1) {
        of_value[((place / 4 * num_groups + d / 32) * 16 + d % 32) * 4 + kOrder[place % 4]] =
            static_cast<std::uint8_t>(stored_value.n[d] | stored_value.n[d + 16] << 4);
    }
    const auto store = [](std::uint8_t* to, float scale, float minimum) {
        const std::uint16_t both[] = {quire::testing::nearest_bfloat16(scale),
                                      quire::testing::nearest_bfloat16(minimum)};
        std::memcpy(to, both, sizeof both);
    };
    for (int group = 0; group < num_groups; ++group) {
        store(of_key + numbers + (group * block_size + place) * 4, stored_key.scales[group],
              stored_key.minimums[group]);
    }
    store(of_value + numbers + place * 4, stored_value.scales[0], stored_value.minimums[0]);
    kernels.write_kv(kv, block * block_size + place, head, key.data(), value.data());
    expect(keys == expected_keys, "%s int4: where keys lie, head_dim %d, blocks of %d", kernels.name, head_dim,
           block_size);
    expect(values == expected_values, "%s int4: where values lie, head_dim %d, blocks of %d", kernels.name, head_dim,
           block_size);
    // Keys of int8 are those of int8 values, too.
    std::vector<std::uint8_t> mixed(num_blocks * kNumKvHeads * block_size * (head_dim + 4), 77), plain = mixed;
    std::vector<std::uint8_t> mixed_values(values.size(), 77), plain_values = plain;
    kv.type = KvType::kK8V4;
    kv.keys = mixed.data();
    kv.values = mixed_values.data();
    kernels.write_kv(kv, block * block_size + place, head, key.data(), value.data());
    kv.type = KvType::kInt8;
    kv.keys = plain.data();
    kv.values = plain_values.data();
    kernels.write_kv(kv, block * block_size + place, head, key.data(), value.data());
    expect(mixed == plain && mixed_values == values, "%s k8v4: where keys and values lie, head_dim %d, blocks of %d",
           kernels.name, head_dim, block_size);
}

// The bfloat16 that write_kv makes of a number.
std::uint16_t written(const Kernels& kernels, float number) {
    std::vector<std::uint16_t> keys(16 * 16), values(16 * 16);
    PagedKv kv;
    kv.keys = keys.data();
    kv.values = values.data();
    kv.type = KvType::kBfloat16;
    kv.num_kv_heads = 1;
    kv.block_size = 16;
    kv.head_dim = 1;
    kernels.write_kv(kv, 0, 0, &number, &number);
    expect(keys[0] == values[0], "%s: %g is another number as a key than as a value", kernels.name, number);
    return keys[0];
}

float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void test_rounding(const Kernels& kernels) {
    const struct {
        std::uint32_t bits;
        std::uint16_t expected;
    } cases[] = {
        {0x3f800000, 0x3f80},  // 1
        {0x3f808000, 0x3f80},  // a tie goes down to even
        {0x3f818000, 0x3f82},  // a tie goes up to even
        {0x3f808001, 0x3f81},  // above a tie
        {0x3f817fff, 0x3f81},  // below a tie
        {0xbf818000, 0xbf82},  // the same below zero
        {0x3fffffff, 0x4000},  // into the next power of two
        {0x00000000, 0x0000}, {0x80000000, 0x8000},
        {0x00000001, 0x0000},  // the smallest float
        {0x00008001, 0x0001},  // a subnormal number
        {0x007fffff, 0x0080},  // up to a normal one
        {0x7f7fffff, 0x7f80},  // beyond the largest number
        {0xff7fffff, 0xff80}, {0x7f7f7fff, 0x7f7f},
        {0x7f7f8000, 0x7f80},  // the tie between the largest number and infinity
        {0x7f800000, 0x7f80}, {0xff800000, 0xff80},
    };
    for (const auto& each : cases) {
        const std::uint16_t actual = written(kernels, from_bits(each.bits));
        expect(actual == each.expected, "%s: %08x is rounded to %04x, not %04x", kernels.name, each.bits, actual,
               each.expected);
    }
    for (const std::uint32_t bits : {0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0xff800001U, 0xffffffffU, 0x7f80ffffU}) {
        const std::uint16_t actual = written(kernels, from_bits(bits));
        expect(std::isnan(quire::testing::from_bfloat16(actual)), "%s: NaN %08x is stored as %04x", kernels.name, bits,
               actual);
    }
    expect(written(kernels, kInfinity) == 0x7f80, "%s: infinity", kernels.name);
    Random random(11);
    for (int i = 0; i < 2000; ++i) {
        const float number = std::ldexp(random.number(), random.below(240) - 120);
        expect(written(kernels, number) == quire::testing::nearest_bfloat16(number), "%s: %a is not rounded to nearest",
               kernels.name, number);
    }
}

void test_write_kv(const Kernels& kernels) {
    for (const int head_dim : {8, 16, 24, 64, 128}) {
        for (const int block_size : kBlockSizes) {
            test_layout<float>(kernels, KvType::kFloat32, head_dim, block_size, 777.0F);
            test_layout<std::uint16_t>(kernels, KvType::kBfloat16, head_dim, block_size, 777);
            test_int8_layout(kernels, head_dim, block_size);
            if (head_dim % 32 == 0) test_int4_layout(kernels, head_dim, block_size);
        }
    }
    test_rounding(kernels);
}

// One latent for all heads: a key of 48 numbers whose first 32 are the value. Compares with an oracle, then cuts tokens
// and heads in every way and compares bits.
void test_latents(const Kernels& kernels, KvType type, int group, const Bend& bend) {
    constexpr int kRank = 32, kWidth = 48, kBlock = 32, kNumBlocks = (kLongest + kBlock - 1) / kBlock;
    Random random(group);
    std::vector<float> latents = random.numbers(static_cast<std::size_t>(kLongest) * kWidth);
    std::vector<float> queries = random.numbers(static_cast<std::size_t>(kLongest) * group * kWidth, -3.0F, 3.0F);
    PagedKv kv;
    kv.type = type;
    kv.num_kv_heads = 1;
    kv.block_size = kBlock;
    kv.head_dim = kWidth;
    kv.latent_dim = kRank;
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(kNumBlocks) * kBlock * kv.key_bytes(), 0xff);
    kv.keys = kv.values = memory.data();
    std::vector<std::int64_t> table(kNumBlocks);
    for (int i = 0; i < kNumBlocks; ++i) table[i] = kNumBlocks - 1 - i;
    for (int position = 0; position < kLongest; ++position) {
        const std::int64_t slot = table[position / kBlock] * kBlock + position % kBlock;
        kernels.write_kv(kv, slot, 0, latents.data() + static_cast<std::size_t>(position) * kWidth, nullptr);
        if (type == KvType::kFloat32) continue;
        for (int d = position * kWidth; d < (position + 1) * kWidth; ++d) {
            latents[d] = quire::testing::from_bfloat16(quire::testing::nearest_bfloat16(latents[d]));
        }
    }
    const int width = group * kRank;
    std::vector<float> scratch(quire::attention_scratch(kWidth), kNan);
    const auto attend_in = [&](int tokens_at_once, int heads_at_once) {
        std::vector<float> output(static_cast<std::size_t>(kLongest) * width, kNan);
        for (int token = 0; token < kLongest; token += tokens_at_once) {
            for (int head = 0; head < group; head += heads_at_once) {
                AttentionTask task;
                task.kv = kv;
                task.block_table = table.data();
                task.query = {queries.data(), group * kWidth};
                task.output = {output.data(), width};
                task.first_token = token;
                task.num_tokens = std::min(tokens_at_once, kLongest - token);
                task.first_position = token;
                task.group = group;
                task.first_in_group = head;
                task.num_in_group = std::min(heads_at_once, group - head);
                task.scale = 0.2F;
                task.window = bend.window;
                task.soft_cap = bend.soft_cap;
                kernels.attention(task, scratch.data());
            }
        }
        return output;
    };
    const std::vector<float> rows = attend_in(1, group);
    double worst = 0.0;
    for (int position = 0; position < kLongest; ++position) {
        const int first = bend.window == 0 ? 0 : std::max(0, position + 1 - static_cast<int>(bend.window));
        for (int head = 0; head < group; ++head) {
            const float* query = queries.data() + (static_cast<std::size_t>(position) * group + head) * kWidth;
            std::vector<double> sums(kRank, 0.0);
            double total = 0.0;
            for (int other = first; other <= position; ++other) {
                const float* latent = latents.data() + static_cast<std::size_t>(other) * kWidth;
                double score = 0.0;
                for (int d = 0; d < kWidth; ++d) score += static_cast<double>(query[d]) * latent[d];
                score *= 0.2;
                if (bend.soft_cap != 0.0F) score = bend.soft_cap * std::tanh(score / bend.soft_cap);
                const double weight = std::exp(score);
                total += weight;
                for (int d = 0; d < kRank; ++d) sums[d] += weight * latent[d];
            }
            for (int d = 0; d < kRank; ++d) {
                const float found = rows[static_cast<std::size_t>(position) * width + head * kRank + d];
                worst = std::max(worst, std::isnan(found) ? 1e9 : std::fabs(found - sums[d] / total));
            }
        }
    }
    expect(worst <= tolerance_of(kernels, type).worst, "%s %s: latents, group %d, window %d, cap %g: error %g",
           kernels.name, quire::testing::name_of(type), group, static_cast<int>(bend.window), bend.soft_cap, worst);
    for (const int tokens : {1, 3, 16}) {
        for (const int heads : {1, 4, 7, group}) {
            const std::vector<float> cut = attend_in(tokens, heads);
            expect(same_bits(cut.data(), rows.data(), rows.size()),
                   "%s %s: latents: bits change with %d tokens and %d of %d heads at once", kernels.name,
                   quire::testing::name_of(type), tokens, heads, group);
        }
    }
}

}  // namespace

int main() {
    for (const KvType type : kTypes) {
        for (const int head_dim : {8, 16, 24, 64, 128}) {
            for (const int group : {1, 2, 3, 8}) test_shape({.head_dim = head_dim, .group = group, .type = type});
        }
    }
    quire::testing::for_each_kernels([](const Kernels& kernels) {
        test_write_kv(kernels);
        test_steep_scores(kernels);
        for (const KvType type : {KvType::kFloat32, KvType::kBfloat16}) {
            for (const int group : {1, 16, 70}) {
                for (const Bend& bend : {Bend{0, 0.0F}, Bend{17, 0.0F}, Bend{0, 5.0F}}) {
                    test_latents(kernels, type, group, bend);
                }
            }
        }
        for (const KvType type : kTypes) {
            for (const int group : {1, 3}) test_cuts(kernels, type, group);
            test_groups(kernels, type);
            for (const int group : {1, 2, 8}) test_members(kernels, type, group);
            for (const Bend& bend : kBends) test_nan_shows(kernels, type, bend);
        }
    });
    return quire::testing::exit_status();
}
