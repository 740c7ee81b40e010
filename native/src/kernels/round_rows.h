// Rounds a row to int8, each 32 inputs by a scale of their own (see quantize.h), and adds up what it rounded to.
#pragma once

#include "quantize.h"

namespace quire::QUIRE_ISA {

// Where the parts of a row go: numbers up to a multiple of 32, the sum of each 16, the scale of each 32.
struct RoundedRow {
    std::int8_t* numbers;
    std::int32_t* sums;
    float* scales;
};

// One group of up to 32 inputs, with zeros after the last one.
inline void round_group(const float* inputs, int count, const RoundedRow& to) {
    float padded[kRowGroup];
    if (count < kRowGroup) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, inputs, count * sizeof(float));
        inputs = padded;
    }
    const Quantizer quantizer = quantizer_of(highest_size(inputs, kRowGroup));
    *to.scales = quantizer.scale;
    quantize_pair(inputs, quantizer.factor, to.numbers, to.sums);
}

#if defined(__AVX512F__)
// The masked forms, with all lanes on: gcc 12 warns that the plain ones start from an undefined value.
constexpr __mmask16 kAll = 0xffff;

// Joins sixteen vectors to one whose lane i is all lanes of vector i, joined.
template <typename Join>
inline __m512i joined_lanes(__m512i* vectors, Join join) {
    for (int i = 0; i < 8; ++i) {
        const __m512i a = vectors[2 * i], b = vectors[2 * i + 1];
        vectors[i] = join(_mm512_maskz_unpacklo_epi32(kAll, a, b), _mm512_maskz_unpackhi_epi32(kAll, a, b));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = vectors[2 * i], b = vectors[2 * i + 1];
        vectors[i] = join(_mm512_maskz_unpacklo_epi64(0xff, a, b), _mm512_maskz_unpackhi_epi64(0xff, a, b));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512i a = vectors[2 * i], b = vectors[2 * i + 1];
        vectors[i] = join(_mm512_maskz_shuffle_i32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_i32x4(kAll, a, b, 0xdd));
    }
    return join(_mm512_maskz_shuffle_i32x4(kAll, vectors[0], vectors[1], 0x88),
                _mm512_maskz_shuffle_i32x4(kAll, vectors[0], vectors[1], 0xdd));
}

constexpr int kGroupsAtOnce = 16;

// Sixteen groups, with the bits of one after the other: their largest sizes and their sums are found together.
inline void round_groups(const float* inputs, const RoundedRow& to) {
    const __m512i size_bits = _mm512_set1_epi32(0x7fffffff);
    __m512i found[kGroupsAtOnce];
    const auto size_of = [&](const float* from) { return _mm512_and_si512(_mm512_loadu_si512(from), size_bits); };
    QUIRE_UNROLLED for (int g = 0; g < kGroupsAtOnce; ++g) {
        const float* group = inputs + g * kRowGroup;
        found[g] = _mm512_maskz_max_epi32(kAll, size_of(group), size_of(group + kLanes));
    }
    const auto larger = [](__m512i a, __m512i b) { return _mm512_maskz_max_epi32(kAll, a, b); };
    float highest[kGroupsAtOnce], factors[kGroupsAtOnce];
    _mm512_storeu_si512(highest, joined_lanes(found, larger));
    for (int g = 0; g < kGroupsAtOnce; ++g) {
        const Quantizer quantizer = quantizer_of(highest[g]);
        to.scales[g] = quantizer.scale;
        factors[g] = quantizer.factor;
    }
    QUIRE_UNROLLED for (int g = 0; g < kGroupsAtOnce; ++g) {
        const float* group = inputs + g * kRowGroup;
        const Ints first = quantized(load(group), factors[g]), second = quantized(load(group + kLanes), factors[g]);
        store_narrow(to.numbers + g * kRowGroup, first);
        store_narrow(to.numbers + g * kRowGroup + kLanes, second);
        found[g] = (__m512i)(first.part[0] + (second.part[0] << 16));
    }
    const auto sum = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    std::int32_t pairs[kGroupsAtOnce];
    _mm512_storeu_si512(pairs, joined_lanes(found, sum));
    for (int g = 0; g < kGroupsAtOnce; ++g) split_sums(pairs[g], to.sums + 2 * g);
}
#endif

inline void round_row(const float* inputs, int num_inputs, RoundedRow to) {
    int i = 0;
    const auto advance = [&](int num_groups) {
        i += num_groups * kRowGroup;
        to.numbers += num_groups * kRowGroup;
        to.sums += num_groups * 2;
        to.scales += num_groups;
    };
#if defined(__AVX512F__)
    for (; i + kGroupsAtOnce * kRowGroup <= num_inputs; advance(kGroupsAtOnce)) round_groups(inputs + i, to);
#endif
    for (; i < num_inputs; advance(1)) round_group(inputs + i, least(kRowGroup, num_inputs - i), to);
}

}  // namespace quire::QUIRE_ISA
