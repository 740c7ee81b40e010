// Compares the operations on one row with oracles in double precision, at every length around the 16 lanes, and
// checks that the memory after the row is unchanged. Prints each failure and exits with 1 if there was any.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "quire/kernels.h"
#include "testing.h"

namespace {

using quire::Activation;
using quire::Kernels;
using quire::NormView;
using quire::testing::expect;
using quire::testing::Random;
using quire::testing::same_bits;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kUntouched = 12345.0F;
constexpr int kCounts[] = {1, 7, 15, 16, 17, 31, 32, 33, 64, 100, 1000};
constexpr Activation kActivations[] = {Activation::kSilu,         Activation::kGeluTanh, Activation::kGelu,
                                       Activation::kQuickGelu,    Activation::kRelu,     Activation::kReluSquared,
                                       Activation::kClampedSwiglu};

double active(double x, Activation activation) {
    switch (activation) {
        case Activation::kSilu:
            return x / (1.0 + std::exp(-x));
        case Activation::kGeluTanh:
            return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
        case Activation::kGelu:
            return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
        case Activation::kQuickGelu:
            return x / (1.0 + std::exp(-1.702 * x));
        case Activation::kRelu:
            return x < 0.0 ? 0.0 : x;
        case Activation::kReluSquared:
            return x < 0.0 ? 0.0 : x * x;
        case Activation::kClampedSwiglu:
            return std::min(x, 7.0) / (1.0 + std::exp(-1.702 * std::min(x, 7.0)));
    }
    return 0.0;
}

void test_activations(const Kernels& kernels) {
    Random random(1);
    for (const Activation activation : kActivations) {
        for (const int count : kCounts) {
            const std::vector<float> input = random.numbers(count, -12.0F, 12.0F);
            std::vector<float> output = input;
            output.push_back(kUntouched);
            kernels.activate(output.data(), count, activation);
            expect(output[count] == kUntouched, "%s: activation %d of %d writes behind them", kernels.name,
                   static_cast<int>(activation), count);
            for (int i = 0; i < count; ++i) {
                const double expected = active(input[i], activation);
                const double bound = 4e-7 * std::max(std::fabs(static_cast<double>(input[i])), std::fabs(expected));
                expect(std::fabs(output[i] - expected) <= bound, "%s: activation %d of %g is %g, not %g", kernels.name,
                       static_cast<int>(activation), input[i], output[i], expected);
                float alone = input[i];
                kernels.activate(&alone, 1, activation);
                expect(same_bits(&alone, &output[i], 1), "%s: activation %d of %g alone and at place %d", kernels.name,
                       static_cast<int>(activation), input[i], i);
            }
        }
        float edges[] = {0.0F, 1000.0F, -1000.0F, kNan, FLT_MAX, -FLT_MAX, kInfinity};
        kernels.activate(edges, 7, activation);
        float limit = 7.0F;
        kernels.activate(&limit, 1, activation);
        const auto highest = [&](float x) {
            if (activation == Activation::kReluSquared) return x * x;
            return activation == Activation::kClampedSwiglu ? limit : x;
        };
        expect(edges[0] == 0.0F && edges[1] == highest(1000.0F) && std::fabs(edges[2]) == 0.0F,
               "%s: activation %d far out", kernels.name, static_cast<int>(activation));
        expect(std::isnan(edges[3]), "%s: activation %d hides a NaN", kernels.name, static_cast<int>(activation));
        expect(edges[4] == highest(FLT_MAX) && std::fabs(edges[5]) == 0.0F && edges[6] == highest(kInfinity),
               "%s: activation %d of the largest numbers", kernels.name, static_cast<int>(activation));
    }
}

void test_norm(const Kernels& kernels, int size, float middle, bool center, bool unit_offset) {
    Random random(static_cast<std::uint64_t>(size));
    const std::vector<float> input = random.numbers(size, middle - 2.0F, middle + 2.0F);
    const std::vector<float> weight = random.numbers(size, 0.5F, 2.0F), bias = random.numbers(size);
    const NormView norm = {.weight = weight.data(),
                           .bias = center ? bias.data() : nullptr,
                           .epsilon = 1e-5F,
                           .center = center,
                           .unit_offset = unit_offset};
    std::vector<float> output(size + 1, kUntouched), in_place = input;
    kernels.normalize(input.data(), output.data(), size, norm);
    kernels.normalize(in_place.data(), in_place.data(), size, norm);
    expect(same_bits(in_place.data(), output.data(), size), "%s: a norm of %d in place", kernels.name, size);
    expect(output[size] == kUntouched, "%s: a norm of %d writes behind them", kernels.name, size);
    double mean = 0.0, square = 0.0, highest = 0.0;
    for (const float value : input) {
        mean += center ? value / static_cast<double>(size) : 0.0;
        highest = std::max(highest, std::fabs(static_cast<double>(value)));
    }
    for (const float value : input) square += (value - mean) * (value - mean) / size;
    const double length = std::sqrt(square + norm.epsilon);
    for (int i = 0; i < size; ++i) {
        const double scale = (unit_offset ? 1.0 : 0.0) + weight[i];
        const double expected = scale * (input[i] - mean) / length + (center ? bias[i] : 0.0);
        // Subtracting the mean costs one rounding of the largest number; so does a sum of many numbers.
        const double bound = scale * (size / 16 + 8) * 0x1.0p-24 * (highest / length + 1.0) + 1e-7;
        expect(std::fabs(output[i] - expected) <= bound,
               "%s: norm of %d around %g, center %d, offset %d: %d is %g, not %g", kernels.name, size, middle, center,
               unit_offset, i, output[i], expected);
    }
}

void test_norms(const Kernels& kernels) {
    for (const int size : kCounts) {
        for (const bool unit_offset : {false, true}) {
            test_norm(kernels, size, 0.0F, false, unit_offset);
            test_norm(kernels, size, 3.0F, false, unit_offset);
            test_norm(kernels, size, 0.0F, true, unit_offset);
            test_norm(kernels, size, 50.0F, true, unit_offset);
        }
    }
    std::vector<float> zeros(33, 0.0F), weight(33, 1.0F);
    const NormView norm = {
        .weight = weight.data(), .bias = nullptr, .epsilon = 1e-6F, .center = false, .unit_offset = false};
    kernels.normalize(zeros.data(), zeros.data(), 33, norm);
    expect(zeros == std::vector<float>(33, 0.0F), "%s: the norm of zeros", kernels.name);
    zeros[32] = kNan;
    kernels.normalize(zeros.data(), zeros.data(), 33, norm);
    expect(std::all_of(zeros.begin(), zeros.end(), [](float value) { return std::isnan(value); }),
           "%s: a norm hides a NaN", kernels.name);
}

void test_rotate(const Kernels& kernels) {
    Random random(2);
    for (const int half : {1, 3, 8, 16, 20, 64}) {
        const std::vector<float> head = random.numbers(2 * half), cosines = random.numbers(half),
                                 sines = random.numbers(half);
        std::vector<float> turned = head;
        turned.push_back(kUntouched);
        kernels.rotate(turned.data(), cosines.data(), sines.data(), half);
        // Two products and their sum, each rounded once: only one result is correct.
        for (int i = 0; i < half; ++i) {
            const float first = head[i], second = head[half + i];
            expect(turned[i] == first * cosines[i] - second * sines[i], "%s: rotate %d, first of pair %d", kernels.name,
                   half, i);
            expect(turned[half + i] == second * cosines[i] + first * sines[i], "%s: rotate %d, second of pair %d",
                   kernels.name, half, i);
        }
        expect(turned[2 * half] == kUntouched, "%s: rotate %d writes behind", kernels.name, half);
    }
}

void test_soft_cap(const Kernels& kernels) {
    Random random(3);
    for (const int count : kCounts) {
        for (const float cap : {1.0F, 30.0F}) {
            const std::vector<float> input = random.numbers(count, -4.0F * cap, 4.0F * cap);
            std::vector<float> output = input;
            output.push_back(kUntouched);
            kernels.soft_cap(output.data(), count, cap);
            expect(output[count] == kUntouched, "%s: a cap of %d writes behind them", kernels.name, count);
            for (int i = 0; i < count; ++i) {
                const double expected = cap * std::tanh(static_cast<double>(input[i]) / cap);
                expect(std::fabs(output[i] - expected) <= 3e-7 * cap, "%s: %g capped at %g is %g", kernels.name,
                       input[i], cap, output[i]);
                float mirrored = -input[i];
                kernels.soft_cap(&mirrored, 1, cap);
                expect(mirrored == -output[i], "%s: the cap of %g is not odd", kernels.name, input[i]);
            }
        }
    }
    for (float x = 1e-7F; x < 40.0F; x *= 1.07F) {
        float capped = x;
        kernels.soft_cap(&capped, 1, 30.0F);
        const double expected = 30.0 * std::tanh(static_cast<double>(x) / 30.0);
        expect(std::fabs(capped - expected) <= 1e-6 * expected, "%s: %g capped at 30 is %g", kernels.name, x, capped);
    }
    float edges[] = {FLT_MAX, -FLT_MAX, kInfinity, -kInfinity, 0.0F, kNan};
    kernels.soft_cap(edges, 6, 30.0F);
    expect(edges[0] == 30.0F && edges[1] == -30.0F && edges[2] == 30.0F && edges[3] == -30.0F && edges[4] == 0.0F,
           "%s: the cap of the largest numbers and of 0", kernels.name);
    expect(std::isnan(edges[5]), "%s: the cap hides a NaN", kernels.name);
}

void test_add(const Kernels& kernels) {
    Random random(4);
    for (const int count : kCounts) {
        const std::vector<float> one = random.numbers(count), other = random.numbers(count);
        std::vector<float> total = one, expected = one;
        total.push_back(kUntouched);
        for (int i = 0; i < count; ++i) expected[i] += other[i];
        expected.push_back(kUntouched);
        kernels.add(total.data(), other.data(), count);
        expect(total == expected, "%s: add %d", kernels.name, count);
    }
}

void test_mix(const Kernels& kernels) {
    Random random(5);
    constexpr int kRows = quire::kMostMixed;
    for (const int size : {16, 48}) {
        const std::vector<float> weights = random.numbers(kRows * kRows), before = random.numbers(kRows * size);
        std::vector<float> mixed = before;
        mixed.push_back(kUntouched);
        float* rows[kRows];
        for (int i = 0; i < kRows; ++i) rows[i] = mixed.data() + i * size;
        kernels.mix(rows, kRows, weights.data(), size);
        expect(mixed.back() == kUntouched, "%s: mix %d writes behind", kernels.name, size);
        for (int j = 0; j < kRows; ++j) {
            for (int d = 0; d < size; ++d) {
                double expected = before[j * size + d];
                for (int i = 0; i < kRows; ++i) {
                    expected += static_cast<double>(weights[j * kRows + i]) * before[i * size + d];
                }
                expect(std::fabs(rows[j][d] - expected) <= 1e-6, "%s: mix %d, row %d: %d is %g, not %g", kernels.name,
                       size, j, d, rows[j][d], expected);
            }
        }
    }
}

void test_means(const Kernels& kernels) {
    Random random(6);
    for (const int count : kCounts) {
        const std::vector<float> values = random.numbers(count, 1.0F, 5.0F);
        double mean = 0.0, square = 0.0;
        for (const float value : values) mean += static_cast<double>(value) / count;
        for (const float value : values) square += (value - 2.0) * (value - 2.0) / count;
        const float found = kernels.mean(values.data(), count),
                    squares = kernels.mean_square(values.data(), count, 2.0F);
        expect(std::fabs(found - mean) <= 1e-5, "%s: the mean of %d is %g, not %g", kernels.name, count, found, mean);
        expect(std::fabs(squares - square) <= 1e-5, "%s: the mean square of %d is %g, not %g", kernels.name, count,
               squares, square);
    }
}

float exponential(const Kernels& kernels, float x) {
    float weight;
    kernels.exponentials(&x, 1, 0.0F, 1.0F, &weight);
    return weight;
}

void test_exp_accuracy(const Kernels& kernels) {
    constexpr int kCount = 1 << 18;
    std::vector<float> x(kCount), weights(kCount);
    for (int i = 0; i < kCount; ++i) x[i] = -87.0F + 175.0F * static_cast<float>(i) / (kCount - 1);
    kernels.exponentials(x.data(), kCount, 0.0F, 1.0F, weights.data());
    double worst = 0.0;
    int where = 0;
    for (int i = 0; i < kCount; ++i) {
        const double expected = std::exp(static_cast<double>(x[i]));
        const double error = std::fabs(weights[i] - expected) / expected;
        if (!(error <= worst)) {
            worst = error;
            where = i;
        }
    }
    expect(worst <= 2e-7, "%s: e^%.9g has a relative error of %g", kernels.name, x[where], worst);

    expect(exponential(kernels, 0.0F) == 1.0F && exponential(kernels, -0.0F) == 1.0F, "%s: e^0", kernels.name);
    for (const float low : {-87.34F, -88.0F, -200.0F, -1e10F, -FLT_MAX, -kInfinity}) {
        expect(exponential(kernels, low) == 0.0F, "%s: e^%g is %g", kernels.name, low, exponential(kernels, low));
    }
    for (const float high : {88.73F, 89.0F, 1e10F, FLT_MAX, kInfinity}) {
        expect(exponential(kernels, high) == kInfinity, "%s: e^%g is %g", kernels.name, high,
               exponential(kernels, high));
    }
    expect(std::isnan(exponential(kernels, kNan)), "%s: e^NaN", kernels.name);
    for (const float near_end : {-87.33F, 88.7F, 88.72F}) {
        const double expected = std::exp(static_cast<double>(near_end));
        expect(std::fabs(exponential(kernels, near_end) - expected) <= 2e-7 * expected, "%s: e^%g", kernels.name,
               near_end);
    }
}

void test_exponentials(const Kernels& kernels) {
    // An infinite temperature gives all tokens one weight; the padding of the last 16 must stay out of the sum.
    const float three[] = {-5.0F, 0.0F, 9.0F};
    float alike[3];
    expect(kernels.exponentials(three, 3, 9.0F, 0.0F, alike) == 3.0, "%s: three equal weights", kernels.name);
    Random random(5);
    for (const int count : kCounts) {
        const std::vector<float> logits = random.numbers(count, -10.0F, 10.0F);
        std::vector<float> weights(count + 1, kUntouched), in_place = logits;
        const double total = kernels.exponentials(logits.data(), count, 9.5F, 0.7F, weights.data());
        expect(weights[count] == kUntouched, "%s: exponentials of %d write behind them", kernels.name, count);
        double sum = 0.0;
        for (int i = 0; i < count; ++i) {
            sum += weights[i];
            const double expected = std::exp((static_cast<double>(logits[i]) - 9.5F) * 0.7F);
            // The exponent is up to 14 and rounded twice.
            expect(std::fabs(weights[i] - expected) <= 3e-6 * expected, "%s: weight %d of %d", kernels.name, i, count);
        }
        expect(std::fabs(total - sum) <= 1e-6 * sum, "%s: the sum of %d exponentials is %g, not %g", kernels.name,
               count, total, sum);
        const double again = kernels.exponentials(in_place.data(), count, 9.5F, 0.7F, in_place.data());
        expect(again == total && same_bits(in_place.data(), weights.data(), count), "%s: exponentials of %d in place",
               kernels.name, count);
    }
}

void test_arg_max(const Kernels& kernels) {
    Random random(6);
    for (int count = 1; count <= 70; ++count) {
        for (int round = 0; round < 10; ++round) {
            // Few different numbers, so that the highest occurs several times.
            std::vector<float> values(count);
            for (float& value : values) value = static_cast<float>(random.below(4)) - 9.0F;
            if (round == 0) std::fill(values.begin(), values.end(), -kInfinity);
            if (round == 1) values[random.below(count)] = kInfinity;
            const auto expected = std::max_element(values.begin(), values.end());
            float value = kNan;
            int index = -1;
            kernels.arg_max(values.data(), count, &value, &index);
            expect(value == *expected && index == expected - values.begin(), "%s: the highest of %d is at %d",
                   kernels.name, count, index);
            values[random.below(count)] = kNan;
            kernels.arg_max(values.data(), count, &value, &index);
            expect(0 <= index && index < count, "%s: %d numbers, one NaN: the highest is at %d", kernels.name, count,
                   index);
        }
    }
}

void test_all_finite(const Kernels& kernels) {
    for (int count = 1; count <= 70; ++count) {
        std::vector<float> values(count, FLT_MAX);
        values.push_back(kNan);  // must not be read
        for (int i = 0; i < count; i += 3) values[i] = i % 2 == 0 ? -FLT_MAX : FLT_TRUE_MIN;
        expect(kernels.all_finite(values.data(), count), "%s: %d finite numbers", kernels.name, count);
        for (int place = 0; place < count; ++place) {
            const float before = values[place];
            for (const float bad : {kNan, kInfinity, -kInfinity}) {
                values[place] = bad;
                expect(!kernels.all_finite(values.data(), count), "%s: %g at %d of %d is not found", kernels.name, bad,
                       place, count);
            }
            values[place] = before;
        }
    }
}

}  // namespace

int main() {
    quire::testing::for_each_kernels([](const Kernels& kernels) {
        test_activations(kernels);
        test_norms(kernels);
        test_rotate(kernels);
        test_soft_cap(kernels);
        test_add(kernels);
        test_mix(kernels);
        test_means(kernels);
        test_exp_accuracy(kernels);
        test_exponentials(kernels);
        test_arg_max(kernels);
        test_all_finite(kernels);
    });
    return quire::testing::exit_status();
}
