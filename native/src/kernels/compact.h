// The layout of a compact matrix: each bfloat16 weight in 12 bits, without loss.
//
//     matrix [out, in]    [out / 64][in / 256] chunks; zeros fill the last 64 outputs. The last chunk has the remaining
//                         steps
//     chunk               a head, then a record for each step
//     head                the exponents of the 16 codes, and the exceptions
//     record              codes of exponents, 4 bits each; then signs and mantissas, 8 bits each
//
// Nearly all weights of a chunk are zero or have one of 15 adjacent exponents. The others are exceptions: they are zero
// in their record, and the head has their places and numbers. Their products are added at the end of the chunk.
//
// A record has the weights [4 panels][16 outputs][inputs of a step], in the order of bytes that lets `widen` put each
// panel into one register: it looks up the bytes of the exponents, and interleaves upper and lower bytes.
#pragma once

#include <cstddef>
#include <cstring>

#include "panels.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

struct Compact {};

#if defined(__AVX2__)

constexpr int kRegisterNumbers = kPanelWidth * Step<std::uint16_t>::kInputs;
constexpr int kRecordNumbers = kGroupPanels * kRegisterNumbers;
constexpr int kRecordBytes = kRecordNumbers * 3 / 2;

struct CompactHead {
    static constexpr int kCodes = 16, kMostExceptions = 55;

    struct Exception {
        std::uint16_t place;  // counted in numbers from the first record
        std::uint16_t number;
    };

    // What the exponent of a code puts into the upper byte of a number, and into the lower one.
    std::uint8_t upper[kCodes], lower[kCodes];
    std::int32_t num_exceptions;
    Exception exceptions[kMostExceptions];
};
static_assert(sizeof(CompactHead) % kLineBytes == 0);

// A group of four panels.
struct CompactGroup {
    const std::byte* first;

    const std::byte* at(int input) const { return first + input / kChunkInputs * chunk_bytes(kChunkInputs); }

    static std::size_t chunk_bytes(int num_inputs) {
        return sizeof(CompactHead) + static_cast<std::size_t>(num_steps<std::uint16_t>(num_inputs)) * kRecordBytes;
    }
    static std::size_t bytes(int num_inputs) {
        const int rest = num_inputs % kChunkInputs;
        return num_inputs / kChunkInputs * chunk_bytes(kChunkInputs) + (rest == 0 ? 0 : chunk_bytes(rest));
    }
};

inline CompactGroup compact_group_of(const MatrixView& matrix, int panel) {
    const std::size_t group = static_cast<std::size_t>(panel) / kGroupPanels;
    return {static_cast<const std::byte*>(matrix.panels) + group * CompactGroup::bytes(matrix.num_inputs)};
}

inline std::size_t compact_bytes(const MatrixView& matrix) {
    return pieces_of(matrix.num_panels(), kGroupPanels) * CompactGroup::bytes(matrix.num_inputs);
}

// A register has the numbers of a panel, or a byte of each number of two panels.
#if defined(__AVX512BF16__)
typedef __m512i Register;
#define QUIRE_ON_REGISTER(operation) _mm512_##operation
#else
typedef __m256i Register;
#define QUIRE_ON_REGISTER(operation) _mm256_##operation
#endif
static_assert(sizeof(Register) == kRegisterNumbers * sizeof(std::uint16_t));

typedef std::uint8_t Bytes __attribute__((vector_size(sizeof(Register))));
typedef std::uint16_t Halves __attribute__((vector_size(sizeof(Register))));

inline Register load_register(const void* from) {
    Register result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

// The exponents of a chunk's codes.
struct Exponents {
    Register upper, lower;

    explicit Exponents(const CompactHead& head) : upper(repeated(head.upper)), lower(repeated(head.lower)) {}

  private:
    static Register repeated(const std::uint8_t (&table)[CompactHead::kCodes]) {
        std::uint8_t all[sizeof(Register)];
        for (std::size_t i = 0; i < sizeof all; i += sizeof table) std::memcpy(all + i, table, sizeof table);
        return load_register(all);
    }
};

// The numbers of a record, a register for each panel.
inline void widen(const std::byte* record, const Exponents& exponents, Register (&panels)[kGroupPanels]) {
    const Bytes codes = (Bytes)load_register(record);
    QUIRE_UNROLLED for (int i = 0; i < 2; ++i) {
        const Register own = (Register)((i == 0 ? codes : (Bytes)((Halves)codes >> 4)) & 15);
        const Bytes rest = (Bytes)load_register(record + (i + 1) * sizeof(Register));
        const auto upper = (Bytes)QUIRE_ON_REGISTER(shuffle_epi8)(exponents.upper, own) | (rest & 0x80);
        const auto lower = (Bytes)QUIRE_ON_REGISTER(shuffle_epi8)(exponents.lower, own) | (rest & 0x7f);
        panels[2 * i] = QUIRE_ON_REGISTER(unpacklo_epi8)((Register)lower, (Register)upper);
        panels[2 * i + 1] = QUIRE_ON_REGISTER(unpackhi_epi8)((Register)lower, (Register)upper);
    }
}

template <>
struct Step<Compact> : Step<std::uint16_t> {
    static Vector vector_of(Register numbers) {
#if defined(__AVX512BF16__)
        return numbers;
#elif defined(__AVX512F__)
        return {{(FloatPart)((IntPart)_mm512_maskz_cvtepu16_epi32(0xffff, numbers) << 16) }};
#else
        return widened(numbers);
#endif
    }
};

// The order of a record: number `number_of_byte(which, byte)` has its sign and mantissa in byte `byte` of register
// `which` after the codes, and its code in half `which` of byte `byte` of the codes.
inline int number_of_byte(int which, int byte) {
    return (2 * which + byte % 16 / 8) * kRegisterNumbers + byte / 16 * 8 + byte % 8;
}

inline std::uint16_t number_in(const std::byte* record, const CompactHead& head, int number) {
    const int panel = number / kRegisterNumbers, in_panel = number % kRegisterNumbers, which = panel / 2;
    const int byte = in_panel / 8 * 16 + panel % 2 * 8 + in_panel % 8;
    const auto code = std::to_integer<unsigned>(record[byte]) >> 4 * which & 15;
    const auto rest = std::to_integer<unsigned>(record[(which + 1) * sizeof(Register) + byte]);
    return static_cast<std::uint16_t>((head.upper[code] | (rest & 0x80)) << 8 | head.lower[code] | (rest & 0x7f));
}

#endif  // __AVX2__

}  // namespace quire::QUIRE_ISA
