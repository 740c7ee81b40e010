// Rounds a row to int8, each 32 inputs with their own scale (see quantize.h), and sums the rounded numbers.
#pragma once

#include "block_product.h"
#include "quantize.h"

namespace quire::QUIRE_ISA {

// The sums of a row's numbers are kept for each kUnit inputs: the smallest group of codes with one scale.
constexpr int kUnit = 16;

// The parts of rounded rows, from a chunk and a row on: the numbers of 256 inputs, the sum of each 16, the scale of
// each 32; and the sums of each 32 and each 16 times their scales, which minimums are multiplied by.
struct RoundedChunk {
    std::int8_t* numbers;
    std::int32_t* sums;
    float *scales, *totals, *unit_totals;

    static constexpr int kNumbers = kChunkInputs, kSums = kChunkInputs / kUnit, kScales = kChunkInputs / kRowGroup;
    static constexpr int kBytes = kNumbers + 4 * (2 * kSums + 2 * kScales);
    static_assert(kBytes == RoundedRows::kInt8Bytes && kChunkInputs == RoundedRows::kChunkInputs);

    RoundedChunk(const RoundedRows& rows, int input, int row) {
        std::byte* from = rows.int8_at(input);
        const auto part = [&]<typename Number>(Number*& to, int count) {
            to = reinterpret_cast<Number*>(from) + row * count;
            from += rows.num_rows * count * sizeof(Number);
        };
        part(numbers, kNumbers);
        part(sums, kSums);
        part(scales, kScales);
        part(totals, kScales);
        part(unit_totals, kSums);
    }
};

// The same for the first group of a row that begins with `input`.
struct RoundedGroup {
    std::int8_t* numbers;
    std::int32_t* sums;
    float* scale;

    RoundedGroup(const RoundedRows& rows, int input, int row) {
        const RoundedChunk chunk(rows, input, row);
        const int own = input % kChunkInputs;
        numbers = chunk.numbers + own;
        sums = chunk.sums + own / kUnit;
        scale = chunk.scales + own / kRowGroup;
    }
};

// One group of up to 32 inputs, with zeros after the last one.
inline void round_group(const float* inputs, int count, const RoundedGroup& to) {
    float padded[kRowGroup];
    if (count < kRowGroup) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, inputs, count * sizeof(float));
        inputs = padded;
    }
    const Quantizer quantizer = quantizer_of(highest_size(inputs, kRowGroup));
    *to.scale = quantizer.scale;
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

// Sixteen groups, with the same bits as one at a time: their maxima and their sums are computed together.
inline void round_groups(const float* inputs, const RoundedRows& rows, int input, int row) {
    static_assert(kGroupsAtOnce * kRowGroup == 2 * kChunkInputs);
    constexpr int kGroups = kGroupsAtOnce / 2;  // of a chunk
    const RoundedGroup chunks[] = {{rows, input, row}, {rows, input + kChunkInputs, row}};
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
        chunks[g / kGroups].scale[g % kGroups] = quantizer.scale;
        factors[g] = quantizer.factor;
    }
    QUIRE_UNROLLED for (int g = 0; g < kGroupsAtOnce; ++g) {
        const float* group = inputs + g * kRowGroup;
        const Ints low = quantized(load(group), factors[g]), high = quantized(load(group + kLanes), factors[g]);
        std::int8_t* numbers = chunks[g / kGroups].numbers + g % kGroups * kRowGroup;
        store_narrow(numbers, low);
        store_narrow(numbers + kLanes, high);
        found[g] = (__m512i)(low.part[0] + (high.part[0] << 16));
    }
    const auto sum = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    std::int32_t pairs[kGroupsAtOnce];
    _mm512_storeu_si512(pairs, joined_lanes(found, sum));
    for (int g = 0; g < kGroupsAtOnce; ++g) split_sums(pairs[g], chunks[g / kGroups].sums + g % kGroups * 2);
}
#endif

// The totals of a chunk of a row.
inline void add_up(const RoundedChunk& chunk, int num_inputs) {
    for (int g = 0; g < round_up(num_inputs, kRowGroup) / kRowGroup; ++g) {
        const std::int32_t* sums = chunk.sums + 2 * g;
        const float scale = chunk.scales[g];
        chunk.totals[g] = scale * static_cast<float>(sums[0] + sums[1]);
        for (int i = 0; i < 2; ++i) chunk.unit_totals[2 * g + i] = scale * static_cast<float>(sums[i]);
    }
}

inline void round_to_int8(const float* from, int num_inputs, const RoundedRows& to, int row) {
    int i = 0;
#if defined(__AVX512F__)
    constexpr int kAtOnce = kGroupsAtOnce * kRowGroup;
    for (; i + kAtOnce <= num_inputs; i += kAtOnce) round_groups(from + i, to, i, row);
#endif
    for (; i < num_inputs; i += kRowGroup) round_group(from + i, least(kRowGroup, num_inputs - i), {to, i, row});
    for (i = 0; i < num_inputs; i += kChunkInputs) add_up({to, i, row}, least(kChunkInputs, num_inputs - i));
}

}  // namespace quire::QUIRE_ISA
