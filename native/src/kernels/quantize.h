// Numbers as int8: x = scale * q with q from -127 to 127, rounded to the nearest, ties to even.
//
// The scale is 1/127 of the largest absolute value among the numbers that share it, so that value is
// exact. If all are zero, or so small that 127 / largest is not a float, the scale is 0. If a number is not
// finite, the scale is NaN, and so is every product with these numbers: the error is visible.
#pragma once

#include <limits>

#include "steps.h"

namespace quire::QUIRE_ISA {

struct Quantizer {
    float scale, factor;  // q = round(x * factor)
};

inline Quantizer quantizer_of(float highest, float most = 127.0F) {
    constexpr float kSmallest = 1e-30F;
    if (!(highest <= std::numeric_limits<float>::max())) return {std::numeric_limits<float>::quiet_NaN(), 0.0F};
    if (highest < kSmallest) return {0.0F, 0.0F};
    return {highest / most, most / highest};
}

// Calls work(place, 16 numbers as floats), with zeros after the last number.
template <typename Number, typename Work>
inline void for_sixteens(const Number* numbers, int count, Work work) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) work(i, load(numbers + i));
    if (i == count) return;
    Number rest[kLanes] = {};
    std::memcpy(rest, numbers + i, (count - i) * sizeof(Number));
    work(i, load(rest));
}

// The largest absolute value; infinity or NaN if one of the numbers is. The bits are compared as integers, where NaN
// is above infinity.
template <typename Number>
inline float highest_size(const Number* numbers, int count) {
    Ints highest = broadcast_int(0);
    for_sixteens(numbers, count, [&](int, const Floats& x) {
        QUIRE_FOR_PARTS(i) {
            const IntPart size = (IntPart)x.part[i] & 0x7fffffff;
            highest.part[i] = highest.part[i] < size ? size : highest.part[i];
        }
    });
    const std::int32_t bits = highest_int(highest);
    float size;
    std::memcpy(&size, &bits, sizeof size);
    return size;
}

// The q of sixteen numbers; arbitrary if a number is not finite.
inline Ints quantized(const Floats& numbers, float factor) {
    const Floats rounding = broadcast(12582912.0F);  // 1.5 * 2^23: adding it puts the rounded number into the low bits
    const Floats shifted = numbers * broadcast(factor) + rounding;
    Ints q;
    QUIRE_FOR_PARTS(i) q.part[i] = (IntPart)shifted.part[i] << 16 >> 16;
    return q;
}

template <typename Stored>
inline void store_narrow(Stored* to, const Ints& q) {
    typedef Stored StoredPart __attribute__((vector_size(kPartLanes * sizeof(Stored))));
    QUIRE_FOR_PARTS(i) {
        const StoredPart narrow = __builtin_convertvector(q.part[i], StoredPart);
        std::memcpy(to + i * kPartLanes, &narrow, sizeof narrow);
    }
}

// Writes each q, sixteen at a time.
template <typename Stored, typename Number>
inline void quantize(const Number* numbers, int count, float factor, Stored* to) {
    for_sixteens(numbers, count, [&](int place, const Floats& x) { store_narrow(to + place, quantized(x, factor)); });
}

// Two sums in one integer, the second one 16 bits higher.
inline void split_sums(std::int32_t both, std::int32_t* sums) {
    sums[0] = static_cast<std::int16_t>(both);
    sums[1] = (both - sums[0]) >> 16;
}

// Writes the q of 32 numbers, and the sums of the first sixteen and of the others.
inline void quantize_pair(const float* numbers, float factor, std::int8_t* to, std::int32_t* sums) {
    const Ints low = quantized(load(numbers), factor), high = quantized(load(numbers + kLanes), factor);
    store_narrow(to, low);
    store_narrow(to + kLanes, high);
    Ints both;
    QUIRE_FOR_PARTS(i) both.part[i] = low.part[i] + (high.part[i] << 16);
    split_sums(sum_int(both), sums);
}

}  // namespace quire::QUIRE_ISA
