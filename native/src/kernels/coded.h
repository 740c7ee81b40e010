// The layout of a coded matrix, and one step of its products.
//
//     matrix [out, in]    [out / 64][in / 256] chunks; the last chunk has the remaining inputs, rounded up to 32
//     chunk               codes of 8 bits: [64 steps][4 panels][16 outputs][4 inputs]
//                         codes of 4 bits: [32 pairs of steps][4 panels][16 outputs][4], two steps in each byte: the
//                         first one in the low half
//                         scales: [groups][4 panels][16] float16; nested: [4 panels][16] float16, then
//                         [groups][4 panels][16] int8
//                         minimums: like scales, if there are any
//
// So a chunk is one stream of memory. Before it is multiplied, codes of 4 bits are widened to 8, and scales to floats:
// once for all rows, into scratch memory in the nearest cache.
#pragma once

#include <cstring>

#include "panels.h"
#include "quire/blocks.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kStepInputs = 4, kStepBytes = kPanelWidth * kStepInputs;

// The sizes of the parts of a chunk of up to four panels.
struct CodedLayout {
    Coding coding;
    int panels;

    std::size_t code_bytes(int inputs) const {
        return static_cast<std::size_t>(inputs) * panels * kPanelWidth * coding.bits / 8;
    }
    std::size_t scale_bytes(int inputs) const {
        const std::size_t lanes = static_cast<std::size_t>(panels) * kPanelWidth, groups = inputs / coding.group;
        return coding.nested ? lanes * (groups + 2) : lanes * groups * 2;
    }
    std::size_t chunk_bytes(int inputs) const {
        return code_bytes(inputs) + scale_bytes(inputs) * (coding.minimums ? 2 : 1);
    }
    // Of all chunks of a matrix with this many inputs.
    std::size_t bytes(int num_inputs) const {
        const int rest = num_inputs % kCodedInputs;
        return num_inputs / kCodedInputs * chunk_bytes(kCodedInputs) +
               (rest == 0 ? 0 : chunk_bytes(round_up(rest, kCodedGroup)));
    }
};

// One panel, or several adjacent ones of a group.
struct CodedPanels {
    const std::byte* group;  // the first chunk of the group
    CodedLayout layout;      // of the group
    int place, count;        // of the panels in it

    const std::byte* at(int input) const { return group + input / kCodedInputs * layout.chunk_bytes(kCodedInputs); }
};

// Returns up to `most` panels of a group, from `panel` on.
inline CodedPanels coded_panels_from(const MatrixView& matrix, int panel, int most) {
    const int place = panel % kGroupPanels, first = panel - place;
    const int in_group = least(kGroupPanels, matrix.num_panels() - first);
    const std::size_t group_bytes = CodedLayout{matrix.coding, kGroupPanels}.bytes(matrix.num_inputs);
    return {.group = static_cast<const std::byte*>(matrix.panels) + first / kGroupPanels * group_bytes,
            .layout = {matrix.coding, in_group},
            .place = place,
            .count = least(most, in_group - place)};
}

inline std::size_t coded_bytes(const MatrixView& matrix) {
    const int rest = matrix.num_panels() % kGroupPanels;
    return matrix.num_panels() / kGroupPanels * CodedLayout{matrix.coding, kGroupPanels}.bytes(matrix.num_inputs) +
           (rest == 0 ? 0 : CodedLayout{matrix.coding, rest}.bytes(matrix.num_inputs));
}

// What a code of 4 bits is less than its value as a signed number: 0 to 15 stand for -8 to 7 without minimums.
inline int middle_of_four_bits(const Coding& coding) { return coding.minimums ? 0 : 8; }

inline int four(const std::int8_t* numbers) {
    int word;
    std::memcpy(&word, numbers, sizeof word);
    return word;
}

// The codes of a step, 64 bytes, times four numbers of a row; sums are exact integers.
#if defined(__AVX512VNNI__)
// The instruction takes unsigned codes, so sums start from -middle times the sum of the row's numbers.
struct CodeStep {
    using Vector = __m512i;
    static constexpr int kFlip = 128;  // a code of 8 bits is stored as code ^ kFlip

    static int middle(const Coding& coding) { return coding.bits == 8 ? kFlip : middle_of_four_bits(coding); }
    static Vector codes(const std::int8_t* from) { return _mm512_loadu_si512(from); }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m512i row = _mm512_set1_epi32(four(numbers));
        return {{(IntPart)_mm512_dpbusd_epi32((__m512i)sum.part[0], codes, row)}};
    }
};
#else
// Codes are signed.
struct CodeStep {
    static constexpr int kFlip = 0;

    static int middle(const Coding&) { return 0; }

#if defined(__AVX2__)
    // The instruction takes unsigned codes, so their signs go to the numbers of the row. Two products are at most
    // 2 * 128 * 127, which 16 bits hold.
#if defined(__AVX512BW__)
    struct Vector {
        __m512i sizes;
        __mmask64 negative;
    };
    static Vector codes(const std::int8_t* from) {
        const __m512i codes = _mm512_loadu_si512(from);
        return {_mm512_abs_epi8(codes), _mm512_movepi8_mask(codes)};
    }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m512i row = _mm512_set1_epi32(four(numbers));
        const __m512i signed_row = _mm512_mask_sub_epi8(row, codes.negative, _mm512_setzero_si512(), row);
        const __m512i pairs = _mm512_maddubs_epi16(codes.sizes, signed_row);
        return {{sum.part[0] + (IntPart)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))}};
    }
#else
    struct Vector {
        __m256i codes[kParts], sizes[kParts];
    };
    static Vector codes(const std::int8_t* from) {
        Vector result;
        QUIRE_FOR_PARTS(i) {
            result.codes[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
            result.sizes[i] = _mm256_abs_epi8(result.codes[i]);
        }
        return result;
    }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m256i row = _mm256_set1_epi32(four(numbers));
        Ints result;
        QUIRE_FOR_PARTS(i) {
            const __m256i pairs = _mm256_maddubs_epi16(codes.sizes[i], _mm256_sign_epi8(row, codes.codes[i]));
            result.part[i] = sum.part[i] + (IntPart)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
        return result;
    }
#endif
#else
    using Vector = const std::int8_t*;
    static Vector codes(const std::int8_t* from) { return from; }
    static Ints add(const Ints& sum, Vector codes, const std::int8_t* numbers) {
        Ints result;
        QUIRE_FOR_PARTS(i) {
            for (int lane = 0; lane < kPartLanes; ++lane) {
                const std::int8_t* own = codes + (i * kPartLanes + lane) * kStepInputs;
                std::int32_t total = sum.part[i][lane];
                for (int k = 0; k < kStepInputs; ++k) total += numbers[k] * own[k];
                result.part[i][lane] = total;
            }
        }
        return result;
    }
#endif
};
#endif

// Widens 64 bytes of codes of 4 bits to two steps, `next_step` bytes apart.
inline void widen_codes(const std::byte* from, int middle, std::int8_t* to, std::size_t next_step) {
    typedef std::uint8_t Bytes __attribute__((vector_size(kPartBytes)));
    for (int i = 0; i < kStepBytes; i += kPartBytes) {
        Bytes both;
        std::memcpy(&both, from + i, sizeof both);
        const Bytes low = (both & 15) - static_cast<std::uint8_t>(middle);
        const Bytes high = (both >> 4) - static_cast<std::uint8_t>(middle);
        std::memcpy(to + i, &low, sizeof low);
        std::memcpy(to + next_step + i, &high, sizeof high);
    }
}

}  // namespace quire::QUIRE_ISA
