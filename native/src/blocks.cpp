#include "quire/blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace quire {
namespace {

using Byte = std::uint8_t;

struct BlockType {
    std::string_view name;
    int inputs, bytes;
    Coding coding;
};

constexpr Coding kFlat4 = {.bits = 4}, kFlat8 = {.bits = 8};
constexpr Coding kFlat4Min = {.bits = 4, .minimums = true};

constexpr Coding nested(int bits, int group, bool minimums = false, CodeTable table = CodeTable::kNone) {
    return {.bits = static_cast<Byte>(bits),
            .group = static_cast<Byte>(group),
            .scales = ScaleType::kNested,
            .minimums = minimums,
            .table = table};
}

// In the order of StoredType, after the floats.
constexpr BlockType kBlockTypes[] = {
    {"Q4_0", 32, 18, kFlat4},
    {"Q4_1", 32, 20, kFlat4Min},
    {"Q5_0", 32, 22, {.bits = 5}},
    {"Q5_1", 32, 24, {.bits = 5, .minimums = true}},
    {"Q8_0", 32, 34, kFlat8},
    {"Q2_K", 256, 84, nested(2, 16, true)},
    {"Q3_K", 256, 110, nested(3, 16, false)},
    {"Q4_K", 256, 144, nested(4, 32, true)},
    {"Q5_K", 256, 176, nested(5, 32, true)},
    {"Q6_K", 256, 210, nested(6, 16, false)},
    {"IQ4_NL", 32, 18, {.bits = 4, .table = CodeTable::kIq4}},
    {"IQ4_XS", 256, 136, nested(4, 32, false, CodeTable::kIq4)},
    {"MXFP4", 32, 17, {.bits = 4, .scales = ScaleType::kPower, .table = CodeTable::kTwiceE2m1}},
    {"NVFP4", 32, 22, {.bits = 4, .group = 16, .scales = ScaleType::kNestedE4m3, .table = CodeTable::kTwiceE2m1}},
    {"TERNARY", 256, 146, nested(2, 16)},
    {"IQ1", 256, 146, nested(3, 16, false, CodeTable::kIq1)},
    {"IQ2", 256, 146, nested(3, 16, false, CodeTable::kIq2)},
    {"IQ3_XXS", 256, 138, nested(4, 32, false, CodeTable::kIq3Xxs)},
    {"IQ3_S", 256, 138, nested(4, 32, false, CodeTable::kIq3S)},
};

const BlockType& block_type(StoredType type) {
    return kBlockTypes[static_cast<int>(type) - static_cast<int>(StoredType::kQ4_0)];
}

std::uint16_t half_at(const Byte* from) { return static_cast<std::uint16_t>(from[0] | from[1] << 8); }

// A float16 with its sign flipped: minimums that a file subtracts are added here.
std::uint16_t negated(std::uint16_t half) { return half ^ 0x8000U; }

// Sixteen bytes as 32 codes: the low halves, then the high ones. The compiler vectorises these loops because it knows
// that a block and its codes do not overlap.
void split(const Byte* __restrict packed, std::int8_t* __restrict codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = static_cast<std::int8_t>(packed[i] & 15);
        codes[i + 16] = static_cast<std::int8_t>(packed[i] >> 4);
    }
}

// The same, with the fifth bits of the codes.
void split(const Byte* __restrict packed, const Byte* __restrict fifth, std::int8_t* __restrict codes) {
    std::uint64_t bits[4];  // each byte eight times
    for (int n = 0; n < 4; ++n) bits[n] = fifth[n] * 0x0101010101010101U & 0x8040201008040201U;
    Byte apart[kCodedGroup];  // a byte for each bit, which is set somewhere in it
    std::memcpy(apart, bits, sizeof apart);
    split(packed, codes);
    for (int i = 0; i < kCodedGroup; ++i) codes[i] |= static_cast<std::int8_t>(apart[i] == 0 ? 0 : 16);
}

// A block of MXFP4: the exponent of a scale, which is halved because the table has twice the numbers; then codes.
void read_mxfp4(const Byte* block, int group, CodedInputs& to) {
    to.scales.bytes[group] = static_cast<std::int8_t>(block[0] == 0 ? 0 : block[0] - 1);
    split(block + 1, to.codes + group * kCodedGroup);
}

// A block of NVFP4 as quire makes it: the factor of the matrix, two scales, codes.
void read_nvfp4(const Byte* block, int group, CodedInputs& to) {
    if (group == 0) std::memcpy(&to.scales.factor, block, sizeof to.scales.factor);
    std::memcpy(&to.scales.bytes[2 * group], block + 4, 2);
    split(block + 6, to.codes + group * kCodedGroup);
}

// A block of 32 as group `group` of the inputs.
void read_small_block(StoredType type, const Byte* block, int group, CodedInputs& to) {
    if (type == StoredType::kMxfp4) return read_mxfp4(block, group, to);
    if (type == StoredType::kNvfp4) return read_nvfp4(block, group, to);
    std::int8_t* codes = to.codes + group * kCodedGroup;
    to.scales.floats[group] = half_at(block);
    to.minimums.floats[group] = half_at(block + 2);  // if the type has minimums
    switch (type) {
        case StoredType::kQ4_0:
        case StoredType::kIq4Nl:
            return split(block + 2, codes);
        case StoredType::kQ4_1:
            return split(block + 4, codes);
        case StoredType::kQ5_0:
            return split(block + 6, block + 2, codes);
        case StoredType::kQ5_1:
            return split(block + 8, block + 4, codes);
        default:
            std::memcpy(codes, block + 2, kCodedGroup);
    }
}

// The scales and minimums of eight groups, six bits each in twelve bytes.
void read_six_bits(const Byte* packed, CodedInputs& to) {
    for (int j = 0; j < 8; ++j) {
        const bool first = j < 4;
        const int scale = first ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        const int minimum = first ? packed[j + 4] & 63 : packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
        to.scales.bytes[j] = static_cast<std::int8_t>(scale);
        to.minimums.bytes[j] = static_cast<std::int8_t>(minimum);
    }
}

void read_q4_k(const Byte* block, const Byte* fifth, const Byte* low, CodedInputs& to) {
    to.scales.floats[0] = half_at(block);
    to.minimums.floats[0] = negated(half_at(block + 2));
    read_six_bits(block + 4, to);
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i) {
            const int four = low[32 * (j / 2) + i] >> 4 * (j % 2) & 15;
            to.codes[32 * j + i] = static_cast<std::int8_t>(fifth == nullptr ? four : four | (fifth[i] >> j & 1) << 4);
        }
    }
}

void read_q6_k(const Byte* block, CodedInputs& to) {
    to.scales.floats[0] = half_at(block + 208);
    std::memcpy(to.scales.bytes, block + 192, 16);
    for (int n = 0; n < 2; ++n) {
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < 32; ++i) {
                const int low = block[64 * n + 32 * (j % 2) + i] >> 4 * (j / 2) & 15;
                const int high = block[128 + 32 * n + i] >> 2 * j & 3;
                to.codes[128 * n + 32 * j + i] = static_cast<std::int8_t>(low | high << 4);
            }
        }
    }
}

// A block of quire's own: a factor, a scale for each 16 or 32 codes, codes: two to a byte, the first one in its low
// half.
void read_own(const Byte* block, int group, CodedInputs& to) {
    const int num_scales = kCodedInputs / group;
    const Byte* codes = block + 2 + num_scales;
    to.scales.floats[0] = half_at(block);
    std::memcpy(to.scales.bytes, block + 2, num_scales);
    for (int i = 0; i < kCodedInputs; ++i) to.codes[i] = static_cast<std::int8_t>(codes[i / 2] >> i % 2 * 4 & 15);
}

// Adds two bits of each weight: of each 32 bytes the lowest two, then the next.
void add_two_bits(const Byte* __restrict packed, std::int8_t* __restrict codes) {
    for (int n = 0; n < 2; ++n) {
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < 32; ++i) codes[128 * n + 32 * j + i] += packed[32 * n + i] >> 2 * j & 3;
        }
    }
}

void read_q2_k(const Byte* block, CodedInputs& to) {
    to.scales.floats[0] = half_at(block + 80);
    to.minimums.floats[0] = negated(half_at(block + 82));
    for (int i = 0; i < 16; ++i) {
        to.scales.bytes[i] = static_cast<std::int8_t>(block[i] & 15);
        to.minimums.bytes[i] = static_cast<std::int8_t>(block[i] >> 4);
    }
    std::memset(to.codes, 0, sizeof to.codes);
    add_two_bits(block + 16, to.codes);
}

void read_q3_k(const Byte* block, CodedInputs& to) {
    const Byte* scales = block + 96;
    to.scales.floats[0] = half_at(block + 108);
    for (int i = 0; i < 16; ++i) {
        const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        to.scales.bytes[i] = static_cast<std::int8_t>((low | (scales[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32);
    }
    for (int j = 0; j < 8; ++j) {
        // The file subtracts 4 if the third bit is not set, and so does a code of 3 bits.
        for (int i = 0; i < 32; ++i) to.codes[32 * j + i] = static_cast<std::int8_t>((block[i] >> j & 1) * 4);
    }
    add_two_bits(block + 32, to.codes);
}

void read_iq4_xs(const Byte* block, CodedInputs& to) {
    to.scales.floats[0] = half_at(block);
    for (int j = 0; j < 8; ++j) {
        const int low = block[4 + j / 2] >> 4 * (j % 2) & 15, high = half_at(block + 2) >> 2 * j & 3;
        to.scales.bytes[j] = static_cast<std::int8_t>((low | high << 4) - 32);
        split(block + 8 + 16 * j, to.codes + 32 * j);
    }
}

void read_large_block(StoredType type, const Byte* block, CodedInputs& to) {
    switch (type) {
        case StoredType::kQ2K:
            return read_q2_k(block, to);
        case StoredType::kQ3K:
            return read_q3_k(block, to);
        case StoredType::kQ4K:
            return read_q4_k(block, nullptr, block + 16, to);
        case StoredType::kQ5K:
            return read_q4_k(block, block + 16, block + 48, to);
        case StoredType::kQ6K:
            return read_q6_k(block, to);
        case StoredType::kIq4Xs:
            return read_iq4_xs(block, to);
        default:
            return read_own(block, coding_of(type).group, to);
    }
}

std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace

std::optional<StoredType> block_type_named(std::string_view name) {
    if (name == "int8_groups") return StoredType::kQ8_0;
    if (name == "int4") return StoredType::kQ4_1;
    for (std::size_t i = 0; i < std::size(kBlockTypes); ++i) {
        if (kBlockTypes[i].name == name) {
            return static_cast<StoredType>(static_cast<std::size_t>(StoredType::kQ4_0) + i);
        }
    }
    return std::nullopt;
}

Coding coding_of(StoredType type) { return block_type(type).coding; }

int block_inputs(StoredType type) { return has_blocks(type) ? block_type(type).inputs : 1; }

std::size_t row_bytes(StoredType type, int num_inputs) {
    if (type == StoredType::kFloat32) return num_inputs * sizeof(float);
    if (type == StoredType::kBfloat16) return num_inputs * sizeof(std::uint16_t);
    return static_cast<std::size_t>(num_inputs / block_type(type).inputs) * block_type(type).bytes;
}

void read_blocks(StoredType type, const std::byte* blocks, int num_inputs, CodedInputs& to) {
    const auto* block = reinterpret_cast<const Byte*>(blocks);
    if (block_type(type).inputs == kCodedInputs) return read_large_block(type, block, to);
    for (int group = 0; group < num_inputs / kCodedGroup; ++group, block += block_type(type).bytes) {
        read_small_block(type, block, group, to);
    }
}

void widen_row(StoredType type, const std::byte* row, int num_inputs, float* to) {
    if (type == StoredType::kFloat32) {
        std::memcpy(to, row, num_inputs * sizeof(float));
        return;
    }
    if (type == StoredType::kBfloat16) {
        const auto* words = reinterpret_cast<const std::uint16_t*>(row);
        for (int i = 0; i < num_inputs; ++i) to[i] = float_of(std::uint32_t{words[i]} << 16);
        return;
    }
    const Coding coding = coding_of(type);
    CodedInputs coded;
    for (int start = 0; start < num_inputs; start += kCodedInputs) {
        const int count = std::min(kCodedInputs, num_inputs - start);
        read_blocks(type, row + row_bytes(type, start), count, coded);
        for (int i = 0; i < count; ++i) {
            const auto of = [&](const CodedInputs::Scales& scales) {
                const std::int8_t byte = scales.bytes[i / coding.group];
                switch (coding.scales) {
                    case ScaleType::kFloat16:
                        return from_float16(scales.floats[i / kCodedGroup]);
                    case ScaleType::kNested:
                        return from_float16(scales.floats[0]) * table_of(coding).factor * static_cast<float>(byte);
                    case ScaleType::kNestedE4m3:
                        return scales.factor * from_e4m3(byte);
                    default:
                        return from_power(byte);
                }
            };
            const float weight = of(coded.scales) * static_cast<float>(number_of(coding, coded.codes[i]));
            to[start + i] = coding.minimums ? weight + of(coded.minimums) : weight;
        }
    }
}

float from_float16(std::uint16_t bits) {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16, rest = bits & 0x7fffU;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000U | (rest & 0x3ffU) << 13);
    // Below the normal numbers, 2^-24 is the unit; above, the exponent moves from a bias of 15 to one of 127.
    const float size = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24F : float_of((rest << 13) + (112U << 23));
    return float_of(bits_of(size) | sign);
}

float from_e4m3(std::int8_t bits) {
    // The bits of a float16 with a bias of 7: 2^8 moves it to 15.
    return from_float16(static_cast<std::uint16_t>(bits << 7)) * 256.0F;
}

float from_power(std::int8_t bits) { return float_of(std::uint32_t{static_cast<Byte>(bits)} << 23); }

std::uint16_t to_float16(float value) {
    const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000U, size = bits & 0x7fffffffU;
    if (size > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
    const float magnitude = float_of(size);
    if (magnitude >= 65520.0F) return static_cast<std::uint16_t>(sign | 0x7c00U);
    if (magnitude < 0x1p-14F) {
        return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::nearbyint(magnitude * 0x1p24F)));
    }
    const std::uint32_t rounded = size + 0xfffU + (size >> 13 & 1);
    return static_cast<std::uint16_t>(sign | (rounded - (112U << 23)) >> 13);
}

}  // namespace quire
