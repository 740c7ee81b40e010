// Groups: the steps whose sums stay in registers, and how a group's sum joins the sums before it.
//
//     float32, bfloat16    one group: the sums continue
//     int8                 128 inputs, rounded by one scale: the integers are added up, then fma(sum, scale, before)
#pragma once

#include <cstring>

#include "quantize.h"
#include "steps.h"

namespace quire::QUIRE_ISA {

// With float32 and bfloat16, all steps are one group …
template <typename Number>
struct Group {
    using Input = typename Step<Number>::Input;
    using Sum = Floats;
    static constexpr int kSteps = 1 << 30, kStride = 0;

    static Floats start(const Input*, const Floats& before) { return before; }
    static Floats end(const Input*, const Floats& sum, const Floats&) { return sum; }
};

// … and with int8, 128 inputs. After its numbers, a group holds its scale and the integer that sums start from.
template <>
struct Group<std::int8_t> {
    using Input = typename Step<std::int8_t>::Input;
    using Sum = typename Step<std::int8_t>::Sum;
    static constexpr int kSteps = kInt8Group / Step<std::int8_t>::kInputs, kStride = kSteps + 2;

    static void take(const float* inputs, int count, Input* group) {
        const Quantizer quantizer = quantizer_of(highest_size(inputs, count));
        auto* numbers = reinterpret_cast<Step<std::int8_t>::Stored*>(group);
        const std::int32_t total = quantize(inputs, count, quantizer.factor, numbers);
        const std::int32_t start = -Step<std::int8_t>::kFlip * total;
        std::memcpy(group + kSteps, &quantizer.scale, sizeof(float));
        std::memcpy(group + kSteps + 1, &start, sizeof start);
    }
    static Sum start(const Input* group, const Floats&) { return Step<std::int8_t>::start(group + kSteps + 1); }
    static Floats end(const Input* group, const Sum& sum, const Floats& before) {
        float scale;
        std::memcpy(&scale, group + kSteps, sizeof scale);
        return fma(to_floats(sum), broadcast(scale), before);
    }
};

}  // namespace quire::QUIRE_ISA
