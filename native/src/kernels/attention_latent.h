// Scores of latents, which have the layout of values: row by row, or in pairs of rows (see kernels.h).
//
// A lane is a dimension here, so a score is the sum of the lanes of its sum, which has one order on every instruction
// set. Latents are widened and queries are not rounded, because a query has already been multiplied by a matrix.
#pragma once

#include "attention_tile.h"

namespace quire::QUIRE_ISA {

// Reads 16 numbers of each of some adjacent tokens, from dimension d on.
template <int kTokens, typename Number>
void load_tokens(const Number* numbers, int token, int stride, int d, Floats (&to)[kTokens]) {
    constexpr int kTogether = Step<Number>::kInputs;
    const Number* from = numbers + static_cast<std::size_t>(token) * stride + static_cast<std::size_t>(d) * kTogether;
    if constexpr (kTogether == 1) {
        QUIRE_UNROLLED for (int t = 0; t < kTokens; ++t) to[t] = load(from + static_cast<std::size_t>(t) * stride);
    } else {
        static_assert(kTogether == 2 && kTokens % 2 == 0 && kParts == 1);
        QUIRE_UNROLLED for (int t = 0; t < kTokens; t += 2) {
            IntPart pairs;
            std::memcpy(&pairs, from + static_cast<std::size_t>(t) * stride, sizeof pairs);
            to[t].part[0] = (FloatPart)(pairs << 16);
            to[t + 1].part[0] = (FloatPart)(pairs & static_cast<std::int32_t>(0xffff0000));
        }
    }
}

// Computes the scores of kCount queries with the latents of kAtOnce groups of 16.
template <int kCount, int kAtOnce, typename Number>
void score_groups(Query* queries, const Part<InRows<Number>>& part, const PagedKv& kv, int group) {
    constexpr int kTokens = kCount == 1 ? 4 : kCount <= 4 && kSums >= 16 ? 4 : 2;
    const int stride = kv.value_stride();
    for (int g = group; g < group + kAtOnce; ++g) {
        const Number* numbers = reinterpret_cast<const Number*>(part.numbers[g]);
        for (int token = 0; token < kLanes; token += kTokens) {
            Floats sums[kCount][kTokens];
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                QUIRE_UNROLLED for (int t = 0; t < kTokens; ++t) sums[q][t] = {};
            }
            for (int d = 0; d < kv.head_dim; d += kLanes) {
                Floats latents[kTokens];
                load_tokens<kTokens>(numbers, token, stride, d, latents);
                QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                    const Floats input = load(static_cast<const float*>(queries[q].vector) + d);
                    QUIRE_UNROLLED for (int t = 0; t < kTokens; ++t) sums[q][t] = fma(input, latents[t], sums[q][t]);
                }
            }
            QUIRE_UNROLLED for (int q = 0; q < kCount; ++q) {
                float* scores = queries[q].scores + g * kLanes + token;
                QUIRE_UNROLLED for (int t = 0; t < kTokens; ++t) scores[t] = sum(sums[q][t]) * queries[q].score_scale;
            }
        }
    }
}

}  // namespace quire::QUIRE_ISA
