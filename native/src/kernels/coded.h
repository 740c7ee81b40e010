// The layout of a coded matrix, and one step of its products.
//
//     matrix [out, in]    [out / 64][in / 256] chunks; the last chunk has the remaining inputs, rounded up to 32
//     chunk               nested scales: the float16 factors of the small scales of 256 inputs, [4 panels][16], and
//                         the same for minimums; of e4m3: float32 factors; then [inputs / 32] units
//     unit                32 inputs of four panels: codes, then scales, then minimums if there are any
//     codes               for each bit of a code a line of 64 bytes of each panel, [bits][4 panels][16 outputs][4]
//                         8 bits: a line is a step of four inputs
//                         4 bits: a line has two steps, the first one in the low halves of its bytes; 2 bits: four
//                         5, 6 bits: four lines of the low four bits, then a line of the fifth bits of all eight
//                         steps, the first step in the lowest bits; or two lines of two more bits for four steps each
//                         3 bits: two lines of the low two bits, then a line of the third bits of all eight steps
//     scales, minimums    [groups][4 panels][16] float16; or bytes: nested scales, or powers of two
//
// So a product reads one stream of memory, line after line. Codes with fewer than 8 bits are widened to bytes in
// registers, just before multiplication.
#pragma once

#include <cstring>

#include "panels.h"
#include "quire/blocks.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kStepInputs = 4, kStepBytes = kPanelWidth * kStepInputs;
constexpr int kUnitInputs = 32, kUnitSteps = kUnitInputs / kStepInputs;
static_assert(kUnitInputs == kCodedGroup);

// The sizes of the parts of a chunk of up to four panels.
struct CodedLayout {
    Coding coding;
    int panels;

    std::size_t lanes() const { return static_cast<std::size_t>(panels) * kPanelWidth; }
    int groups() const { return kUnitInputs / coding.group; }  // of a unit
    std::size_t line_bytes() const { return panels * static_cast<std::size_t>(kStepBytes); }
    std::size_t code_bytes() const { return coding.bits * line_bytes(); }
    std::size_t group_bytes() const { return lanes() * coding.scale_bytes(); }  // of the scales of a group
    std::size_t scale_bytes() const { return groups() * group_bytes(); }
    std::size_t unit_bytes() const { return code_bytes() + scale_bytes() * (coding.minimums ? 2 : 1); }
    std::size_t factor_bytes() const { return coding.scales == ScaleType::kNestedE4m3 ? 4 : 2; }  // of nested scales
    // The bytes before the units.
    std::size_t outer_bytes() const { return coding.nested() ? factor_bytes() * lanes() : 0; }
    std::size_t head_bytes() const { return outer_bytes() * (coding.minimums ? 2 : 1); }
    std::size_t chunk_bytes(int inputs) const { return head_bytes() + inputs / kUnitInputs * unit_bytes(); }
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

inline int four(const std::int8_t* numbers) {
    int word;
    std::memcpy(&word, numbers, sizeof word);
    return word;
}

// Part by part: gcc 12 would keep a complete copy in memory, not in registers.
inline Ints load_step(const std::byte* from) {
    Ints bytes;
    QUIRE_FOR_PARTS(i) std::memcpy(&bytes.part[i], from + i * kPartBytes, sizeof bytes.part[i]);
    return bytes;
}

// The bits of a code in the first lines of a unit, the steps of such a line, and how many lines there are.
constexpr int low_bits(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }
constexpr int line_steps(int bits) { return 8 / low_bits(bits); }
constexpr int low_lines(int bits) { return kUnitSteps / line_steps(bits); }

// Each byte of a word.
constexpr std::int32_t every_byte(unsigned byte) { return static_cast<std::int32_t>(0x01010101U * byte); }

// Two steps at most are widened at once: more would not stay in registers.
constexpr int steps_at_once(int bits) { return bits == 8 ? 1 : 2; }

// Some steps of a line of a panel, from `first` on, as bytes; codes of fewer than 8 bits are from 0 on. `high`: the
// first of the lines that have the other bits, if there are any.
template <int kBits>
inline void steps_of(const std::byte* at, const std::byte* high, std::size_t line_bytes, int line, int first,
                     Ints (&steps)[steps_at_once(kBits)]) {
    constexpr int kLow = low_bits(kBits), kSteps = line_steps(kBits), kMore = kBits - kLow;
    const Ints all = load_step(at);
    steps[0] = all;
    if constexpr (kBits < 8) {
        QUIRE_UNROLLED for (int s = 0; s < 2; ++s) {
            const int before = kLow * (first + s);
            QUIRE_FOR_PARTS(i) steps[s].part[i] = all.part[i] >> before & every_byte((1 << kLow) - 1);
        }
    }
    if constexpr (kMore > 0) {
        // The other bits: of this step, above those of the steps before it in the same line.
        const Ints more = load_step(high + line * kSteps * kMore / 8 * line_bytes);
        const int before = line * kSteps * kMore % 8 + kMore * first;
        QUIRE_FOR_PARTS(i) {
            const IntPart own = more.part[i] >> before << kLow;
            QUIRE_UNROLLED for (int s = 0; s < 2; ++s) {
                steps[s].part[i] |= own >> kMore * s & every_byte(((1 << kMore) - 1) << kLow);
            }
        }
    }
}

// The numbers that codes have in a table, as bytes.
inline Ints looked_up(const Ints& codes, const std::int8_t* table) {
    Ints result;
#if defined(__AVX2__)
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#if defined(__AVX512BW__)
    const __m512i all = _mm512_maskz_broadcast_i32x4(0xffff, numbers);
    result.part[0] = (IntPart)_mm512_maskz_shuffle_epi8(~0ULL, all, (__m512i)codes.part[0]);
#else
    const __m256i all = _mm256_broadcastsi128_si256(numbers);
    QUIRE_FOR_PARTS(i) result.part[i] = (IntPart)_mm256_shuffle_epi8(all, (__m256i)codes.part[i]);
#endif
#else
    std::int8_t bytes[kStepBytes];
    std::memcpy(bytes, &codes, sizeof bytes);
    for (std::int8_t& byte : bytes) byte = table[byte];
    std::memcpy(&result, bytes, sizeof bytes);
#endif
    return result;
}

// Each of the bytes minus `middle`.
inline Ints less(const Ints& bytes, int middle) {
    typedef std::int8_t BytePart __attribute__((vector_size(kPartBytes)));
    Ints result;
    QUIRE_FOR_PARTS(i) result.part[i] = (IntPart)((BytePart)bytes.part[i] - static_cast<std::int8_t>(middle));
    return result;
}

// The codes of a step, 64 bytes, times four numbers of a row; sums are exact integers.
//
//     sum = first(correction); sum = add(sum, codes, numbers) for each step of a group; total(sum, correction)
//
// The middle is not subtracted from unsigned codes; -middle times the sum of the row's numbers corrects their sums.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kFlip = 128;  // a code of 8 bits is stored as code ^ kFlip
#else
constexpr int kFlip = 0;
#endif

struct AnyCodeStep {
    static Ints first(int correction) { return broadcast_int(correction); }
    static Ints total(const Ints& sum, int) { return sum; }
};

#if defined(__AVX512VNNI__)
template <int kBits>
struct CodeStep : AnyCodeStep {
    using Vector = __m512i;
    static constexpr bool kSigned = false;

    static Vector codes(const Ints& bytes) { return (__m512i)bytes.part[0]; }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m512i row = _mm512_set1_epi32(four(numbers));
        return {{(IntPart)_mm512_dpbusd_epi32((__m512i)sum.part[0], codes, row)}};
    }
};
#elif defined(__AVXVNNI__)
template <int kBits>
struct CodeStep : AnyCodeStep {
    using Vector = Ints;
    static constexpr bool kSigned = false;

    static Vector codes(const Ints& bytes) { return bytes; }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m256i row = _mm256_set1_epi32(four(numbers));
        Ints result;
        QUIRE_FOR_PARTS(i) {
            result.part[i] = (IntPart)_mm256_dpbusd_avx_epi32((__m256i)sum.part[i], (__m256i)codes.part[i], row);
        }
        return result;
    }
};
#else
template <int kBits>
struct CodeStep : AnyCodeStep {
    static constexpr bool kSigned = true;

#if defined(__AVX2__)
    // The instruction needs unsigned codes, so their signs move to the numbers of the row. Two products are at most
    // 2 * 128 * 127, which fits into 16 bits.
#if defined(__AVX512BW__)
    struct Vector {
        __m512i sizes;
        __mmask64 negative;
    };
    static Vector codes(const Ints& bytes) {
        const auto codes = (__m512i)bytes.part[0];
        return {_mm512_abs_epi8(codes), _mm512_movepi8_mask(codes)};
    }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m512i row = _mm512_set1_epi32(four(numbers));
        const __m512i signed_row = _mm512_mask_sub_epi8(row, codes.negative, _mm512_setzero_si512(), row);
        const __m512i pairs = _mm512_maddubs_epi16(codes.sizes, signed_row);
        return {{ sum.part[0] + (IntPart)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)) }};
    }
#else
    struct Vector {
        __m256i codes[kParts], sizes[kParts];
    };
    static Vector codes(const Ints& bytes) {
        Vector result;
        QUIRE_FOR_PARTS(i) {
            result.codes[i] = (__m256i)bytes.part[i];
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
#if defined(__SSE2__)
    // Of each four codes the first and the third, then the second and the fourth, as numbers of 16 bits.
    struct Vector {
        __m128i even[kParts], odd[kParts];
    };
    static Vector codes(const Ints& bytes) {
        Vector result;
        QUIRE_FOR_PARTS(i) {
            const auto pairs = (__m128i)bytes.part[i];
            result.even[i] = _mm_srai_epi16(_mm_slli_epi16(pairs, 8), 8);
            result.odd[i] = _mm_srai_epi16(pairs, 8);
        }
        return result;
    }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m128i row = _mm_set1_epi32(four(numbers));
        const __m128i even = _mm_srai_epi16(_mm_slli_epi16(row, 8), 8), odd = _mm_srai_epi16(row, 8);
        Ints result;
        QUIRE_FOR_PARTS(i) {
            const __m128i products =
                _mm_add_epi32(_mm_madd_epi16(codes.even[i], even), _mm_madd_epi16(codes.odd[i], odd));
            result.part[i] = sum.part[i] + (IntPart)products;
        }
        return result;
    }
#else
    // Each of the four codes as 32 bits.
    struct Vector {
        Ints code[kStepInputs];
    };
    static Vector codes(const Ints& bytes) {
        Vector result;
        QUIRE_FOR_PARTS(i) {
            QUIRE_UNROLLED for (int k = 0; k < kStepInputs; ++k) {
                result.code[k].part[i] = (IntPart)((WordPart)bytes.part[i] << (24 - 8 * k)) >> 24;
            }
        }
        return result;
    }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        Ints result = sum;
        QUIRE_FOR_PARTS(i) {
            QUIRE_UNROLLED for (int k = 0; k < kStepInputs; ++k) result.part[i] += codes.code[k].part[i] * numbers[k];
        }
        return result;
    }
#endif
#endif
};

#if defined(__AVX2__) && !defined(__AVX512BW__)
// Codes from 0 to 15: the products of all steps of a group are at most 8 * 2 * 15 * 127, which fits into 16 bits; so
// are those of the four steps of a group of NVFP4, from 0 to 24.
template <>
struct CodeStep<4> {
    using Vector = Ints;
    static constexpr bool kSigned = false;
    static_assert(kUnitSteps * 2 * 15 * 127 < 1 << 15 && kUnitSteps / 2 * 2 * 24 * 127 < 1 << 15);

    static Vector codes(const Ints& bytes) { return bytes; }
    static Ints first(int) { return broadcast_int(0); }
    static Ints add(const Ints& sum, const Vector& codes, const std::int8_t* numbers) {
        const __m256i row = _mm256_set1_epi32(four(numbers));
        Ints result;
        QUIRE_FOR_PARTS(i) {
            const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes.part[i], row);
            result.part[i] = (IntPart)_mm256_add_epi16((__m256i)sum.part[i], pairs);
        }
        return result;
    }
    static Ints total(const Ints& sum, int correction) {
        Ints result = broadcast_int(correction);
        QUIRE_FOR_PARTS(i) { result.part[i] += (IntPart)_mm256_madd_epi16((__m256i)sum.part[i], _mm256_set1_epi16(1)); }
        return result;
    }
};
#endif
#endif

// Codes of 2 and 3 bits are codes of 4 bits that are smaller.
template <>
struct CodeStep<2> : CodeStep<4> {};
template <>
struct CodeStep<3> : CodeStep<4> {};

// The numbers of all tables, as products need them: unsigned ones plus the offset.
template <bool kSigned>
struct StepTables {
    alignas(16) std::int8_t of[kNumTables][16] = {};

    constexpr StepTables() {
        for (int table = 0; table < kNumTables; ++table) {
            const int offset = kSigned ? 0 : middle_of({.bits = 4, .table = CodeTable(table)});
            for (int code = 0; code < 16; ++code) {
                of[table][code] = static_cast<std::int8_t>(kTables[table].numbers[code] + offset);
            }
        }
    }
};

template <bool kSigned>
constexpr StepTables<kSigned> kStepTables;

}  // namespace quire::QUIRE_ISA
