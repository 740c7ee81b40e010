// Numbers as int8: x = scale * q with q from -127 to 127, rounded to the nearest, ties to even.
//
// The scale is 1/127 of the largest absolute value among the numbers that share it, so that value is
// exact. If all are zero, or so small that 127 / largest is no float, the scale is 0. If one is not finite,
// the scale is NaN, and so is every product with these numbers: the fault is visible.
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

// Writes each q, sixteen at a time, and returns their sum.
template <typename Stored, typename Number>
inline std::int32_t quantize(const Number* numbers, int count, float factor, Stored* to) {
    typedef Stored StoredPart __attribute__((vector_size(kPartLanes * sizeof(Stored))));
    constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it puts the rounded number into the lowest bits
    const Floats scale = broadcast(factor), rounding = broadcast(kRounding);
    Ints total = broadcast_int(0);
    for_sixteens(numbers, count, [&](int place, const Floats& x) {
        const Floats shifted = x * scale + rounding;
        QUIRE_FOR_PARTS(i) {
            const IntPart q = (IntPart)shifted.part[i] << 16 >> 16;  // arbitrary if x is not finite
            const StoredPart narrow = __builtin_convertvector(q, StoredPart);
            std::memcpy(to + place + i * kPartLanes, &narrow, sizeof narrow);
            total.part[i] += q;
        }
    });
    return sum_int(total);
}

}  // namespace quire::QUIRE_ISA
