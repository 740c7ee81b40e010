// The inner loops of attention over keys and values of 4 bits; see attention.cpp and int4.h.
#pragma once

#include "attention_tile.h"

namespace quire::QUIRE_ISA {

// The numbers of a rounded query, in pairs.
inline const std::uint32_t* pairs_of_query(const Query& query) {
    return static_cast<const std::uint32_t*>(query.vector);
}

// Computes the scores of kCount queries with the tokens of kAtOnce groups of 16. Integers become floats after each
// group of numbers with a scale.
template <int kCount, int kAtOnce>
void score_groups(Query* queries, const Part<CachedInt4>& tokens, const PagedKv& kv, int group) {
    const int num_parts = kv.value_stride() / kInt4Group;
    Floats scores[kCount][kAtOnce];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) scores[q][g] = broadcast(0.0F);
    }
    for (int part = 0; part < num_parts; ++part) {
        Ints sums[kCount][kAtOnce];
        QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
            QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) sums[q][g] = {};
        }
        constexpr int kPairs = kInt4Group / 2;
        for (int pair = 0; pair < kPairs; pair += kInt4Pairs) {
            const std::size_t at = static_cast<std::size_t>(part * kPairs + pair) / kInt4Pairs * kLineBytes;
            Ints bytes[kAtOnce];
            QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
                bytes[g] = load_ints(tokens.numbers[group + g] + at);
                prefetch(tokens.next[group + g] + at);
            }
            QUIRE_UNROLLED for (int p = 0; p < kInt4Pairs; ++p) {
                Ints keys[kAtOnce];
                QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) keys[g] = pairs_of(bytes[g], p);
                QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                    const std::uint32_t input = pairs_of_query(queries[q])[part * kPairs + pair + p];
                    QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) sums[q][g] = add_pairs(sums[q][g], input, keys[g]);
                }
            }
        }
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
            const Scales scales(tokens.scales[group + g] + static_cast<std::size_t>(part) * kv.block_size);
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                const Floats sum = fma(to_floats(sums[q][g]), scales.scale, scores[q][g]);
                const float* of_parts = reinterpret_cast<const float*>(pairs_of_query(queries[q]) + num_parts * kPairs);
                scores[q][g] = fma(broadcast(of_parts[part]), scales.minimum, sum);
            }
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int g = 0; g < kAtOnce; ++g) {
            store(queries[q].scores + (group + g) * kLanes, scores[q][g] * broadcast(queries[q].score_scale));
        }
    }
}

// Adds the weighted values of some steps of four tokens to the sums of kCount queries, kWide vectors of them. kWide is
// even.
template <int kCount, int kWide>
void add_wide(Query* queries, const Part<CachedInt4>& part, int first_step, int end_step, int value_stride, int d) {
    constexpr int kGroupSteps = kLanes / kInt4Tokens;
    const std::uint32_t* weights[kCount];
    Ints sums[kCount][kWide];
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        weights[q] = reinterpret_cast<const std::uint32_t*>(queries[q].scores);
        QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) sums[q][w] = {};
    }
    for (int step = first_step; step < end_step; ++step) {
        const int group = step / kGroupSteps;
        const std::size_t at = static_cast<std::size_t>(step % kGroupSteps * value_stride + d) * kInt4Tokens / 2;
        QUIRE_UNROLLED for (int w = 0; w < kWide; w += 2) {
            const Ints bytes = load_ints(part.numbers[group] + at + w / 2 * kLineBytes);
            prefetch(part.next[group] + at + w / 2 * kLineBytes);
            QUIRE_UNROLLED for (int p = 0; p < kInt4Pairs; ++p) {
                const Ints values = pairs_of(bytes, p);
                QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                    Ints& sum = sums[q][w + p % 2];
                    sum = add_pairs(sum, weights[q][2 * step + p / 2], values);
                }
            }
        }
    }
    QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
        QUIRE_UNROLLED for (int w = 0; w < kWide; ++w) {
            float* to = queries[q].sums + d + w * kLanes;
            const Floats centred = to_floats(sums[q][w]) - broadcast(queries[q].centre_sum);  // exact
            store(to, fma(centred, broadcast(queries[q].weight_scale), load(to)));
        }
    }
}

}  // namespace quire::QUIRE_ISA
