// Rows of weights as files store them, and as codes with scales.
//
// A file has rows of numbers, or of blocks: 32 or 256 weights as small integers with scales in float16. The compiled
// core takes both as `CodedInputs`: 256 weights of an output at a time, where
//
//     weight = scale * code + minimum
//
// and a scale is either the float16 of 32 inputs, or a small integer times the float16 of all 256 ("nested"); minimums,
// if there are any, likewise. NVFP4 has scales in e4m3 instead of small integers, from 0 to 448, times a float32 below
// 128; MXFP4 has powers of two. Blocks become codes without rounding, so the weights equal those in the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "quire/kernels.h"

namespace quire {

constexpr int kCodedInputs = 256;
// A row of blocks has a multiple of this many inputs; codes that are made here are padded to such a multiple.
constexpr int kCodedGroup = 32;

// Up to 256 weights of an output.
struct CodedInputs {
    // With 8 bits: signed. With fewer: from 0 on, and they represent `middle_of` less.
    std::int8_t codes[kCodedInputs];
    struct Scales {
        std::uint16_t floats[kCodedInputs / kCodedGroup];  // float16: of each 32 inputs; nested: the first one, of all
        std::int8_t bytes[kCodedInputs / 16];              // of each 16 or 32 inputs, if scales are not float16
        float factor;                                      // of all, if nested scales are e4m3
    } scales, minimums;
};

QUIRE_INLINE constexpr bool has_blocks(StoredType type) { return type > StoredType::kBfloat16; }

// The block type with a GGUF name, such as Q4_K; int8_groups and int4 name the types of codes made from floats.
std::optional<StoredType> block_type_named(std::string_view name);

// The type of a packed matrix.
QUIRE_INLINE constexpr NumberType packed_type(StoredType type) {
    return type == StoredType::kFloat32    ? NumberType::kFloat32
           : type == StoredType::kBfloat16 ? NumberType::kBfloat16
                                           : NumberType::kCoded;
}

// The format of the weights of blocks, once packed.
Coding coding_of(StoredType type);

// What the codes of a table represent; nested scales are multiplied by a factor too.
struct Table {
    std::int8_t numbers[16];
    float factor = 1;
};

// Twice an e2m1, a float of a sign, 2 bits of exponent and 1 of mantissa; then the numbers of GGUF's IQ types.
constexpr Table kTables[] = {
    {},
    {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}},
    {{-7, 1, 9, 0, -9, -1, 7}, 0.125F},
    {{8, 25, 43, 0, -8, -25, -43}, 0.125F},
    {{4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}, 0.25F},
    {{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}},
    {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}},
};
constexpr int kNumTables = sizeof kTables / sizeof kTables[0];

QUIRE_INLINE constexpr const Table& table_of(const Coding& coding) { return kTables[static_cast<int>(coding.table)]; }

// The offset of unsigned codes from the numbers that they represent: without minimums, 0 to 15 represent -8 to 7. The
// numbers of a table get one that makes them unsigned.
QUIRE_INLINE constexpr int middle_of(const Coding& coding) {
    if (coding.table == CodeTable::kNone) {
        return coding.bits == 8 || coding.minimums ? 0 : 1 << (coding.bits - 1);
    }
    int lowest = 0;
    for (const int number : table_of(coding).numbers) lowest = number < lowest ? number : lowest;
    return -lowest;
}

// The number that a code represents.
QUIRE_INLINE constexpr int number_of(const Coding& coding, int code) {
    return coding.table == CodeTable::kNone ? code - middle_of(coding) : table_of(coding).numbers[code];
}

// Bytes of a row of `num_inputs` numbers, a multiple of a block's bytes.
std::size_t row_bytes(StoredType type, int num_inputs);
// The inputs of a block; 1 for floats.
int block_inputs(StoredType type);

// Reads blocks of up to 256 weights.
void read_blocks(StoredType type, const std::byte* blocks, int num_inputs, CodedInputs& to);

// The weights of a stored row as floats.
void widen_row(StoredType type, const std::byte* row, int num_inputs, float* to);

float from_float16(std::uint16_t bits);
// Of an e4m3 from 0 on: a float of 4 bits of exponent and 3 of mantissa.
float from_e4m3(std::int8_t bits);
// 2^(bits - 127); zero for 0.
float from_power(std::int8_t bits);
// Rounds to the nearest, ties to even.
std::uint16_t to_float16(float value);

}  // namespace quire
