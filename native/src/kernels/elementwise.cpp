// Activations, norms, rotary positions: operations on one row.
#include <cmath>
#include <limits>

#include "kernels_of_set.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

Floats silu(const Floats& x) { return x / (broadcast(1.0F) + exp(broadcast(0.0F) - x)); }

Floats gelu_tanh(const Floats& x) {
    const Floats cubic = broadcast(0.044715F) * x * x * x;
    const Floats inner = broadcast(0.7978845608F) * (x + cubic);
    return broadcast(0.5F) * x * (broadcast(1.0F) + tanh(inner));
}

// The polynomial with the given coefficients, the highest power first.
template <int kCount>
Floats polynomial(const Floats& x, const float (&coefficients)[kCount]) {
    Floats sum = broadcast(coefficients[0]);
    QUIRE_UNROLLED for (int i = 1; i < kCount; ++i) sum = fma(sum, x, broadcast(coefficients[i]));
    return sum;
}

// x times the share of a normal distribution that lies below x: (1 + erf(x / sqrt 2)) / 2.
//
// Below 1, erf(a) / a is a polynomial in a squared. Above, log(erfc(a)) is a polynomial, and the share is computed from
// erfc, which loses no digits where it is small. Above 5, erfc counts as 0. Both polynomials are minimax fits; erf is
// off by at most 6e-8.
Floats gelu(const Floats& x) {
    constexpr float kNear[] = {7.889122935e-5F, -8.020842215e-4F, 5.189535674e-3F, -2.685444430e-2F,
                               1.128360033e-1F, -3.761262596e-1F, 1.128379107F};
    constexpr float kFar[] = {1.425366804e-6F,  -4.208786049e-5F, 5.653926055e-4F, -4.622667562e-3F, 2.606146224e-2F,
                              -1.094967574e-1F, -6.323970556e-1F, -1.129924655F,   2.493767824e-4F};
    const Floats zero = broadcast(0.0F), one = broadcast(1.0F), half = broadcast(0.5F), farthest = broadcast(5.0F);
    const Floats scaled = x * broadcast(0.70710678F);
    const Mask negative = x < zero;
    const Floats size = select(negative, zero - scaled, scaled);
    const Floats near = fma(scaled, polynomial(scaled * scaled, kNear), one);
    const Floats rest = select(farthest < size, zero, exp(polynomial(size, kFar)));
    return half * x * select(size < one, near, select(negative, rest, broadcast(2.0F) - rest));
}

constexpr float kSwigluFactor = 1.702F, kSwigluLimit = 7.0F;

Floats quick_gelu(const Floats& x) { return x / (broadcast(1.0F) + exp(x * broadcast(-kSwigluFactor))); }

// Zero for negative numbers, NaN for NaN.
Floats relu(const Floats& x) { return select(x < broadcast(0.0F), broadcast(0.0F), x); }

Floats relu_squared(const Floats& x) { return relu(x) * relu(x); }

Floats clamped_swish(const Floats& x) {
    const Floats limit = broadcast(kSwigluLimit);
    return quick_gelu(select(limit < x, limit, x));
}

// The factor of a clamped gate: x clamped to both limits, plus 1; NaN for NaN.
Floats clamped_factor(const Floats& x) {
    const Floats high = broadcast(kSwigluLimit), low = broadcast(-kSwigluLimit);
    return select(x < low, low, select(high < x, high, x)) + broadcast(1.0F);
}

// Applies `operation` to 16 numbers at a time, and to the last ones in a padded copy.
template <typename Operation>
void for_lanes(float* values, int count, Operation operation) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(values + i, operation(load(values + i)));
    if (i == count) return;
    float lane[kLanes] = {};
    for (int j = i; j < count; ++j) lane[j - i] = values[j];
    store(lane, operation(load(lane)));
    for (int j = i; j < count; ++j) values[j] = lane[j - i];
}

// The sum of (x - shift)^power over the row, as 16 parallel sums; power is 1 or 2.
template <int kPower>
float sum_of(const float* values, int count, float shift) {
    Floats total = broadcast(0.0F);
    const auto add_to = [&](const Floats& x) {
        const Floats moved = x - broadcast(shift);
        total = kPower == 1 ? total + moved : fma(moved, moved, total);
    };
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) add_to(load(values + i));
    if (i < count) {
        float lane[kLanes];
        for (int j = 0; j < kLanes; ++j) lane[j] = i + j < count ? values[i + j] : shift;
        add_to(load(lane));
    }
    return sum(total);
}

}  // namespace

void activate(float* values, int count, Activation activation) {
    switch (activation) {
        case Activation::kSilu:
            return for_lanes(values, count, silu);
        case Activation::kGeluTanh:
            return for_lanes(values, count, gelu_tanh);
        case Activation::kGelu:
            return for_lanes(values, count, gelu);
        case Activation::kQuickGelu:
            return for_lanes(values, count, quick_gelu);
        case Activation::kRelu:
            return for_lanes(values, count, relu);
        case Activation::kReluSquared:
            return for_lanes(values, count, relu_squared);
        case Activation::kClampedSwiglu:
            return for_lanes(values, count, clamped_swish);
    }
}

void gate(float* values, const float* ups, int count, Activation activation) {
    activate(values, count, activation);
    for (int i = 0; i < count; i += kLanes) {
        const Floats up = load(ups + i);
        store(values + i, load(values + i) * (activation == Activation::kClampedSwiglu ? clamped_factor(up) : up));
    }
}

void multiply_by_sigmoid(float* values, const float* gates, int count) {
    const Floats zero = broadcast(0.0F), one = broadcast(1.0F);
    for (int i = 0; i < count; i += kLanes) store(values + i, load(values + i) / (one + exp(zero - load(gates + i))));
}

void normalize(const float* input, float* output, int size, const NormView& norm) {
    const float middle = norm.center ? mean(input, size) : 0.0F;
    const float length = std::sqrt(mean_square(input, size, middle) + norm.epsilon);
    const float offset = norm.unit_offset ? 1.0F : 0.0F;
    for (int i = 0; i < size; ++i) {
        const float scaled = (offset + norm.weight[i]) * ((input[i] - middle) / length);
        output[i] = norm.bias == nullptr ? scaled : scaled + norm.bias[i];
    }
}

void rotate(float* head, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[i] + first * sines[i];
    }
}

void soft_cap(float* values, int count, float cap) {
    const Floats limit = broadcast(cap);
    for_lanes(values, count, [&](const Floats& x) { return limit * tanh(x / limit); });
}

void add(float* values, const float* others, int count) {
    for (int i = 0; i < count; ++i) values[i] += others[i];
}

void mix(float* const* rows, int num_rows, const float* weights, int size) {
    for (int d = 0; d < size; d += kLanes) {
        Floats before[kMostMixed];
        for (int i = 0; i < num_rows; ++i) before[i] = load(rows[i] + d);
        for (int j = 0; j < num_rows; ++j) {
            Floats total = before[j];
            for (int i = 0; i < num_rows; ++i) total = fma(broadcast(weights[j * num_rows + i]), before[i], total);
            store(rows[j] + d, total);
        }
    }
}

float mean(const float* values, int count) { return sum_of<1>(values, count, 0.0F) / static_cast<float>(count); }

float mean_square(const float* values, int count, float middle) {
    return sum_of<2>(values, count, middle) / static_cast<float>(count);
}

bool all_finite(const float* values, int count) {
    // x * 0 is 0 if x is finite, else NaN.
    const Floats zero = broadcast(0.0F);
    Floats total = zero;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) total = fma(load(values + i), zero, total);
    float rest = sum(total);
    for (; i < count; ++i) rest += values[i] * 0.0F;
    return rest == 0.0F;
}

double exponentials(const float* logits, int count, float shift, float factor, float* weights) {
    const Floats moved = broadcast(shift), scale = broadcast(factor);
    double total = 0.0;
    for (int i = 0; i < count; i += kLanes) {
        float lane[kLanes];
        for (int j = 0; j < kLanes; ++j) lane[j] = i + j < count ? logits[i + j] : 0.0F;
        const Floats weight = select(lanes_between(0, count - i), exp((load(lane) - moved) * scale), broadcast(0.0F));
        store(lane, weight);
        for (int j = 0; j < kLanes && i + j < count; ++j) weights[i + j] = lane[j];
        total += sum(weight);
    }
    return total;
}

void arg_max(const float* values, int count, float* value, int* index) {
    float best = -std::numeric_limits<float>::infinity();
    int i = 0;
    if (count >= kLanes) {
        Floats lanes = load(values);
        for (i = kLanes; i + kLanes <= count; i += kLanes) lanes = max(lanes, load(values + i));
        best = highest(lanes);
    }
    for (; i < count; ++i) best = best < values[i] ? values[i] : best;
    int first = 0;
    while (first < count - 1 && !(values[first] == best)) ++first;
    *value = best;
    *index = first;
}

}  // namespace quire::QUIRE_ISA
