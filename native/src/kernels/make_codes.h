// Codes made from floats: for each 32 inputs, integers with a scale, and with a minimum for 4 bits.
//
//     8 bits    scale = largest absolute value / 127, rounded up to float16 so that the codes reach this value;
//               codes from -127 to 127
//     4 bits    minimum = the lowest number, scale = (highest - minimum) / 15; codes from 0 to 15
//
// A group with a number that is not finite, or too large for float16, gets NaN as its scale: the error is visible.
#pragma once

#include <cmath>
#include <cstring>

#include "quantize.h"
#include "quire/blocks.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

constexpr std::uint16_t kNotFinite = 0x7e00;  // a NaN

// The bits of floats as integers in the same order, and back; NaN is beyond infinity.
inline Ints in_order(const Floats& numbers) {
    Ints result;
    QUIRE_FOR_PARTS(i) {
        const IntPart bits = (IntPart)numbers.part[i];
        result.part[i] = bits ^ (bits >> 31 & 0x7fffffff);
    }
    return result;
}

inline float from_order(std::int32_t place) {
    const std::int32_t bits = place ^ (place >> 31 & 0x7fffffff);
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// The lowest and the highest number of up to eight groups, which are the lanes of vectors.
struct Ranges {
    float lowest[kLanes] = {}, highest[kLanes] = {};

    template <typename Number>
    void set(int group, const Number* numbers) {
        const Ints first = in_order(load(numbers)), second = in_order(load(numbers + kLanes));
        Ints low, high;
        QUIRE_FOR_PARTS(i) {
            const IntPart is_less = first.part[i] < second.part[i];
            low.part[i] = is_less ? first.part[i] : second.part[i];
            high.part[i] = is_less ? second.part[i] : first.part[i];
        }
        lowest[group] = from_order(fold(low, [](IntPart a, IntPart b) { return a < b ? a : b; }));
        highest[group] = from_order(highest_int(high));
    }
};

// The scales and minimums of groups, as lanes.
struct GroupScales {
    std::uint16_t scale[kLanes], minimum[kLanes] = {};
    float base[kLanes] = {}, step[kLanes], factor[kLanes];

    GroupScales(const Ranges& ranges, bool minimums) {
        const Floats low = load(ranges.lowest), high = load(ranges.highest), zero = broadcast(0.0F);
        if (minimums) {
            store_float16(minimum, low);
            store(base, load_float16(minimum));
            const Floats range = high - load(base);
            store_float16(scale, select(zero < range, range, zero) / broadcast(15.0F));
        } else {
            const Floats size = low * broadcast(-1.0F), least = select(size < high, high, size) / broadcast(127.0F);
            store_float16(scale, least);
            store(step, load_float16(scale));
            float wanted[kLanes];
            store(wanted, least);
            for (int group = 0; group < kLanes; ++group) scale[group] += step[group] < wanted[group] ? 1 : 0;
        }
        const Floats steps = load_float16(scale);
        store(step, steps);
        store(factor, select(zero < steps, broadcast(1.0F) / steps, zero));
        for (int group = 0; group < kLanes; ++group) {
            if (std::isfinite(ranges.lowest[group]) && std::isfinite(ranges.highest[group]) &&
                std::isfinite(base[group]) && std::isfinite(step[group])) {
                continue;
            }
            scale[group] = minimum[group] = kNotFinite;
        }
    }
};

// Makes codes from up to 256 numbers.
template <typename Number>
void make_codes(const Number* numbers, int count, bool minimums, CodedInputs& to) {
    const int num_groups = pieces_of(count, kCodedGroup);
    Number padded[kCodedInputs];
    if (count % kCodedGroup != 0) {
        for (int i = 0; i < num_groups * kCodedGroup; ++i) padded[i] = numbers[least(i, count - 1)];
        numbers = padded;
    }
    Ranges ranges;
    for (int group = 0; group < num_groups; ++group) ranges.set(group, numbers + group * kCodedGroup);
    const GroupScales scales(ranges, minimums);
    const Floats lowest = broadcast(minimums ? 0.0F : -127.0F), highest = broadcast(minimums ? 15.0F : 127.0F);
    for (int group = 0; group < num_groups; ++group) {
        const Floats base = broadcast(scales.base[group]), factor = broadcast(scales.factor[group]);
        for (int start = group * kCodedGroup; start < (group + 1) * kCodedGroup; start += kLanes) {
            const Floats exact = (load(numbers + start) - base) * factor;
            const Floats inside = select(exact < lowest, lowest, select(highest < exact, highest, exact));
            store_narrow(to.codes + start, quantized(inside, 1.0F));
        }
        to.scales.floats[group] = scales.scale[group];
        to.minimums.floats[group] = scales.minimum[group];
        if (scales.scale[group] == kNotFinite) std::memset(to.codes + group * kCodedGroup, 0, kCodedGroup);
    }
    std::memset(to.codes + count, 0, num_groups * kCodedGroup - count);
}

}  // namespace quire::QUIRE_ISA
