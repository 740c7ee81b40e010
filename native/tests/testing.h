// Helpers of the test programs: counting failures, seeded numbers, the kernels that this machine can run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "quire/cpu_features.h"
#include "quire/decoder.h"
#include "quire/kernels.h"

#if defined(__x86_64__)
// The AMX kernels over tiles in plain C++; see emulated_tiles.h.
namespace quire::amx_emulated {
const Kernels& kernels();
}
#endif

namespace quire::testing {

inline int num_failures = 0;

// Prints a failure, in the format of printf. Only for the main thread.
__attribute__((format(printf, 2, 3))) inline void expect(bool condition, const char* what, ...) {
    if (condition) return;
    constexpr int kMostPrinted = 50;  // one bug in a kernel fails thousands of comparisons
    if (++num_failures > kMostPrinted) return;
    std::va_list arguments;
    va_start(arguments, what);
    std::fprintf(stderr, "FAILED: ");
    std::vfprintf(stderr, what, arguments);
    std::fprintf(stderr, "\n");
    va_end(arguments);
}

// The result of main.
inline int exit_status() {
    if (num_failures > 0) std::fprintf(stderr, "%d failures\n", num_failures);
    return num_failures == 0 ? 0 : 1;
}

// Seeded numbers. Avoids the distributions of the standard library, which differ between implementations.
class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    double share() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }
    float number(float low = -1.0F, float high = 1.0F) { return low + static_cast<float>(share()) * (high - low); }
    int below(int end) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(end)); }

    std::vector<float> numbers(std::size_t count, float low = -1.0F, float high = 1.0F) {
        std::vector<float> result(count);
        for (float& each : result) each = number(low, high);
        return result;
    }

    template <typename Value>
    void shuffle(std::vector<Value>& values) {
        for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(static_cast<int>(i))]);
    }

  private:
    std::mt19937_64 engine_;
};

// Calls test(kernels) for each set of kernels that this machine can run. The emulated set still needs AVX-512 BF16.
template <typename Test>
void for_each_kernels(Test test) {
    for (const Kernels* kernels : usable_kernels()) test(*kernels);
#if defined(__x86_64__)
    if (best_instruction_set(cpu_features()) >= InstructionSet::kAvx512Bf16) test(amx_emulated::kernels());
#endif
}

inline bool same_bits(const float* one, const float* other, std::size_t count) {
    // The data of an empty vector may be null.
    return count == 0 || std::memcmp(one, other, count * sizeof(float)) == 0;
}

inline bool same_bits(const std::vector<float>& one, const std::vector<float>& other) {
    return one.size() == other.size() && same_bits(one.data(), other.data(), one.size());
}

inline const char* name_of(NumberType type) {
    constexpr const char* kNames[] = {"float32", "bfloat16", "compact", "coded"};
    return kNames[static_cast<int>(type)];
}

inline const char* name_of(KvType type) {
    constexpr const char* kNames[] = {"float32", "bfloat16", "int8", "k8v4", "int4"};
    return kNames[static_cast<int>(type)];
}

inline float from_bfloat16(std::uint16_t half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The nearest bfloat16 of a finite number, found by comparing distances, unlike in the kernels.
inline std::uint16_t nearest_bfloat16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto toward_zero = static_cast<std::uint16_t>(bits >> 16);
    const auto away = static_cast<std::uint16_t>(toward_zero + 1);
    // As in IEEE 754, rounding works as if another number followed the largest one.
    const double step = (away & 0x7fffU) == 0x7f80U
                            ? static_cast<double>(from_bfloat16(toward_zero)) - from_bfloat16(toward_zero - 1)
                            : static_cast<double>(from_bfloat16(away)) - from_bfloat16(toward_zero);
    const double share = (static_cast<double>(value) - from_bfloat16(toward_zero)) / step;
    if (share != 0.5) return share < 0.5 ? toward_zero : away;
    return toward_zero % 2 == 0 ? toward_zero : away;
}

// Numbers as int8, computed plainly: each is near q * scale, q from -127 to 127.
struct Quantized {
    explicit Quantized(const std::vector<float>& numbers) {
        float highest = 0.0F;
        for (const float number : numbers) highest = std::fmax(highest, std::fabs(number));
        scale = highest / 127.0F;
        const float factor = highest > 0.0F ? 127.0F / highest : 0.0F;
        for (const float number : numbers) q.push_back(static_cast<int>(std::nearbyint(number * factor)));
    }

    std::vector<int> q;
    float scale;
};

// Numbers of a head as 4 bits hold them, computed plainly: a group is near scale * n + minimum, n from 0 to 15.
struct Int4Head {
    Int4Head(const std::vector<float>& head, int group) : rotated(rotate(head)) {
        const int count = static_cast<int>(head.size());
        for (int start = 0; start < count; start += group) {
            const auto begin = rotated.begin() + start, end = rotated.begin() + std::min(count, start + group);
            const float low = *std::min_element(begin, end);
            const float high = *std::max_element(begin, end);
            minimums.push_back(from_bfloat16(nearest_bfloat16(low)));
            scales.push_back(from_bfloat16(nearest_bfloat16((high - minimums.back()) / 15.0F)));
            for (auto number = begin; number != end; ++number) {
                const float steps = (*number - minimums.back()) * (1.0F / scales.back());
                n.push_back(static_cast<int>(std::nearbyint(std::fmin(std::fmax(steps, 0.0F), 15.0F))));
            }
        }
    }

    // Multiplies by a Hadamard matrix, part by part. Sums have the order of the kernels, so that all floats are equal
    // and are rounded to the same n.
    template <typename Number>
    static std::vector<Number> rotate(std::vector<Number> numbers) {
        const int count = static_cast<int>(numbers.size()), size = count & -count;
        for (int start = 0; start < count; start += size) add_and_subtract(numbers.data() + start, size);
        const Number factor = 1 / std::sqrt(static_cast<Number>(size));
        for (Number& number : numbers) number *= factor;
        return numbers;
    }

    template <typename Number>
    static void add_and_subtract(Number* numbers, int size) {
        if (size == 1) return;
        const int half = size / 2;
        add_and_subtract(numbers, half);
        add_and_subtract(numbers + half, half);
        for (int i = 0; i < half; ++i) {
            const Number low = numbers[i], high = numbers[i + half];
            numbers[i] = low + high;
            numbers[i + half] = low - high;
        }
    }

    std::vector<double> restored(int group) const {
        std::vector<double> numbers;
        for (std::size_t i = 0; i < n.size(); ++i) {
            numbers.push_back(static_cast<double>(scales[i / group]) * n[i] + minimums[i / group]);
        }
        return rotate(numbers);
    }

    std::vector<float> rotated, scales, minimums;
    std::vector<int> n;
};

// Whether a set multiplies matrices of a type in tiles.
inline bool multiplies_tiles(const Kernels& kernels, NumberType type) {
    const std::string_view name = kernels.name;
    return (type == NumberType::kBfloat16 || type == NumberType::kCompact) && (name == "amx" || name == "amx_emulated");
}

// Whether a set multiplies pairs of bfloat16, so that the other factor is rounded to bfloat16 too.
inline bool multiplies_pairs(const Kernels& kernels, NumberType type) {
    return multiplies_tiles(kernels, type) || ((type == NumberType::kBfloat16 || type == NumberType::kCompact) &&
                                               std::string_view(kernels.name) == "avx512_bf16");
}

inline bool multiplies_pairs(const Kernels& kernels, KvType type) {
    return type == KvType::kBfloat16 && multiplies_pairs(kernels, NumberType::kBfloat16);
}

}  // namespace quire::testing
