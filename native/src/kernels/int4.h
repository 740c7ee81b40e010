// Keys and values of 4 bits: x = scale * n + minimum, with n from 0 to 15.
//
// A Hadamard matrix is applied first. It spreads a few large numbers of a head over all of its numbers, so that a
// scale fits them better. It is symmetric and orthogonal: rotated queries have the same products with rotated keys, and
// applied to the weighted sum of rotated values it gives the sum of the values.
//
// Scale and minimum are bfloat16. n is rounded with these stored values, so their own rounding costs little. If a
// number is not finite, the scale is NaN, and so is every product: the error is visible.
//
// Four bytes hold eight numbers, as four pairs: pair p is (bits 4p … 4p + 3, bits 16 + 4p … 16 + 4p + 3). So a shift
// and a mask give two numbers of 16 bits. No byte has numbers of two tokens, because threads write tokens
// independently.
//
//     of a key      numbers 8i … 8i + 7 of one token: pair p is (8i + 2p, 8i + 2p + 1)
//     of a value    numbers d and d + 16 of four tokens:
//                       pair      0                  1                  2                  3
//                       tokens    0, 1               0, 1               2, 3               2, 3
//                       number    d                  d + 16             d                  d + 16
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "quire/simd.h"
#include "steps.h"

namespace quire::QUIRE_ISA {

// bfloat16: the scale in the lower half, the minimum in the upper one.
enum class ScaleAndMinimum : std::uint32_t {};

constexpr int kInt4Most = 15;
constexpr float kInt4Centre = 7.5F;
constexpr int kInt4Pairs = 4;           // of each lane of a vector
constexpr int kInt4Tokens = 4;          // of values that are adjacent
constexpr int kMostInt4Numbers = 1024;  // of a head

inline Ints load_ints(const void* from) {
    Ints result;
    QUIRE_FOR_PARTS(i) std::memcpy(&result.part[i], static_cast<const std::byte*>(from) + i * kPartBytes, kPartBytes);
    return result;
}

// Pair `p` of each lane.
inline Ints pairs_of(const Ints& bytes, int p) {
    Ints result;
    QUIRE_FOR_PARTS(i) result.part[i] = (bytes.part[i] >> (4 * p)) & 0x000f000f;
    return result;
}

// Adds the products of a pair of each lane with two numbers of 16 bits.
inline Ints add_pairs(const Ints& sum, std::uint32_t input, const Ints& pairs) {
#if defined(__AVX512BW__)
    return WidenedInt8::add(sum, WidenedInt8::input(&input), (__m512i)pairs.part[0]);
#elif defined(__AVX2__)
    WidenedInt8::Vector numbers;
    QUIRE_FOR_PARTS(i) numbers.part[i] = (__m256i)pairs.part[i];
    return WidenedInt8::add(sum, WidenedInt8::input(&input), numbers);
#else
    const int first = static_cast<std::int16_t>(input), second = static_cast<std::int16_t>(input >> 16);
    Ints result;
    QUIRE_FOR_PARTS(i) {
        result.part[i] = sum.part[i] + first * (pairs.part[i] & 0xffff) + second * (pairs.part[i] >> 16);
    }
    return result;
#endif
}

// The scales and the minimums of sixteen tokens.
struct Scales {
    explicit Scales(const ScaleAndMinimum* from) {
        const Ints words = load_ints(from);
        QUIRE_FOR_PARTS(i) {
            scale.part[i] = (FloatPart)(words.part[i] << 16);
            minimum.part[i] = (FloatPart)(words.part[i] & static_cast<std::int32_t>(0xffff0000));
        }
    }

    Floats scale, minimum;
};

// Multiplies the numbers of a head by a Hadamard matrix, divided by the root of its size: the largest power of two that
// divides their count. If that is less than the count, the matrix is applied to one part after another.
inline void rotate_head(float* numbers, int count) {
    const int size = count & -count;
    for (int half = 1; half < size; half *= 2) {
        for (int start = 0; start < count; start += 2 * half) {
            float *low = numbers + start, *high = low + half;
            for (int i = 0; i < half; ++i) {
                const float a = low[i], b = high[i];
                low[i] = a + b;
                high[i] = a - b;
            }
        }
    }
    const float factor = 1.0F / std::sqrt(static_cast<float>(size));
    for (int i = 0; i < count; ++i) numbers[i] *= factor;
}

inline std::uint16_t nearest_bfloat16(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    const std::uint32_t nearest = bits + 0x7fffU + ((bits >> 16) & 1U);  // ties to even
    const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;              // stays one
    return static_cast<std::uint16_t>((is_nan ? bits | 0x400000U : nearest) >> 16);
}

inline float from_bfloat16(std::uint16_t half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// The integers that some numbers are rounded to.
class Int4Quantizer {
  public:
    Int4Quantizer(const float* numbers, int count) {
        float lowest = numbers[0], highest = numbers[0];
        bool is_finite = true;
        for (int i = 0; i < count; ++i) {
            lowest = numbers[i] < lowest ? numbers[i] : lowest;
            highest = highest < numbers[i] ? numbers[i] : highest;
            is_finite &= std::fabs(numbers[i]) <= kLargest;
        }
        constexpr float kSmallest = 1e-30F;
        const std::uint16_t low = nearest_bfloat16(lowest);
        minimum_ = from_bfloat16(low);
        const float step = (highest - minimum_) / static_cast<float>(kInt4Most);
        std::uint16_t scale = step < kSmallest ? 0 : nearest_bfloat16(step);
        if (scale != 0) factor_ = 1.0F / from_bfloat16(scale);
        if (!is_finite || !(from_bfloat16(scale) <= kLargest) || !(std::fabs(minimum_) <= kLargest)) scale = 0x7fc0;
        stored_ = static_cast<ScaleAndMinimum>(scale | static_cast<std::uint32_t>(low) << 16);
    }

    ScaleAndMinimum stored() const { return stored_; }

    // From 0 to 15, rounded to the nearest, ties to even; arbitrary if the scale is NaN.
    std::uint32_t round(float number) const {
        constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23, as in quantize.h
        const float steps = (number - minimum_) * factor_;
        const float inside = steps < 0.0F ? 0.0F : steps < kInt4Most ? steps : static_cast<float>(kInt4Most);
        return static_cast<std::uint32_t>((inside + kRounding) - kRounding);
    }

  private:
    static constexpr float kLargest = std::numeric_limits<float>::max();

    float minimum_, factor_ = 0.0F;
    ScaleAndMinimum stored_;
};

}  // namespace quire::QUIRE_ISA
