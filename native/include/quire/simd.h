// Sixteen numbers at a time, the same way on every instruction set.
//
// Kernels are written once, over `Floats`: 16 lanes, held in one 512-bit, two 256-bit or four
// 128-bit registers, whichever the file is compiled for. Every kernel file is compiled once per
// instruction set, with QUIRE_ISA naming the namespace, and nothing inline is shared between the
// copies: a function that the linker took from the wrong copy would fault on an older processor.
//
// A lane is an output, never a share of a sum: sums run over time, one step after another, so the
// order of a sum is the order of the loop. The two horizontal operations (`sum`, `highest`) have
// one fixed order.
//
// `fma` is one rounding where the instruction set has it and two elsewhere. Within one instruction
// set it is always the same, which is what the promise of equal bits asks for; the compiler may not
// fuse by itself (-ffp-contract=off), because it would do so in one place and not in another.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef QUIRE_ISA
#error "kernels are compiled with QUIRE_ISA=portable, avx2, avx512 or avx512_bf16"
#endif

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kPartBytes = 64;
#elif defined(__AVX2__)
constexpr int kPartBytes = 32;
#else
constexpr int kPartBytes = 16;
#endif
constexpr int kParts = 64 / kPartBytes;
constexpr int kPartLanes = kLanes / kParts;

typedef float FloatPart __attribute__((vector_size(kPartBytes)));
typedef std::int32_t IntPart __attribute__((vector_size(kPartBytes)));

struct Floats {
    FloatPart part[kParts];
};

struct Ints {
    IntPart part[kParts];
};

// A lane is all ones or all zeros.
struct Mask {
    IntPart part[kParts];
};

#define QUIRE_FOR_PARTS(i) _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

inline Floats broadcast(float value) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = value - FloatPart{};
    return result;
}

inline Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline void store(float* to, const Floats& value) { std::memcpy(to, &value, sizeof value); }

// bfloat16 is the upper half of a float.
inline Floats load(const std::uint16_t* from) {
    Floats result;
#if defined(__AVX512F__)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    // The masked form, all lanes on: gcc 12 warns of the plain one's undefined start value.
    result.part[0] = (FloatPart)((IntPart)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
#elif defined(__AVX2__)
    QUIRE_FOR_PARTS(i) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
        result.part[i] = (FloatPart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    }
#else
    typedef std::uint16_t HalfPart __attribute__((vector_size(kPartBytes / 2)));
    typedef std::uint32_t WordPart __attribute__((vector_size(kPartBytes)));
    QUIRE_FOR_PARTS(i) {
        HalfPart halves;
        std::memcpy(&halves, from + i * kPartLanes, sizeof halves);
        result.part[i] = (FloatPart)(__builtin_convertvector(halves, WordPart) << 16);
    }
#endif
    return result;
}

// int8, widened.
inline Floats load(const std::int8_t* from) {
    typedef std::int8_t BytePart __attribute__((vector_size(kPartLanes)));
    Floats result;
    QUIRE_FOR_PARTS(i) {
        BytePart bytes;
        std::memcpy(&bytes, from + i * kPartLanes, sizeof bytes);
        result.part[i] = __builtin_convertvector(__builtin_convertvector(bytes, IntPart), FloatPart);
    }
    return result;
}

inline Floats operator+(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] + b.part[i];
    return result;
}

inline Floats operator-(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] - b.part[i];
    return result;
}

inline Floats operator*(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] * b.part[i];
    return result;
}

inline Floats operator/(const Floats& a, const Floats& b) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] / b.part[i];
    return result;
}

// a * b + c
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    Floats result;
#if defined(__AVX512F__)
    result.part[0] = _mm512_fmadd_ps(a.part[0], b.part[0], c.part[0]);
#elif defined(__FMA__)
    QUIRE_FOR_PARTS(i) result.part[i] = _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#else
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
    return result;
}

inline Mask operator<(const Floats& a, const Floats& b) {
    Mask result;
    QUIRE_FOR_PARTS(i) result.part[i] = a.part[i] < b.part[i];
    return result;
}

// Where the mask is set `yes`, elsewhere `no`.
inline Floats select(const Mask& mask, const Floats& yes, const Floats& no) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
    return result;
}

inline Floats max(const Floats& a, const Floats& b) { return select(a < b, b, a); }

// Lane i of the mask is set where first <= i < end.
inline Mask lanes_between(int first, int end) {
    static constexpr std::int32_t kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Mask result;
    QUIRE_FOR_PARTS(i) {
        IntPart index;
        std::memcpy(&index, kIndex + i * kPartLanes, sizeof index);
        result.part[i] = (index >= first) & (index < end);
    }
    return result;
}

// The sum of the lanes: halves added to halves.
inline float sum(const Floats& value) {
    float lane[kLanes];
    store(lane, value);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    }
    return lane[0];
}

inline float highest(const Floats& value) {
    float lane[kLanes];
    store(lane, value);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lane[i] = lane[i] < lane[i + width] ? lane[i + width] : lane[i];
    }
    return lane[0];
}

inline Ints broadcast_int(std::int32_t value) {
    Ints result;
    QUIRE_FOR_PARTS(i) result.part[i] = value - IntPart{};
    return result;
}

inline Floats to_floats(const Floats& value) { return value; }

inline Floats to_floats(const Ints& value) {
    Floats result;
    QUIRE_FOR_PARTS(i) result.part[i] = __builtin_convertvector(value.part[i], FloatPart);
    return result;
}

// The lanes joined to one, halves to halves, in registers where they are wide; `join` takes vectors or numbers.
template <typename Join>
std::int32_t joined(const Ints& value, Join join) {
#if defined(__AVX2__)
    typedef std::int32_t Ints8 __attribute__((vector_size(32)));
    typedef std::int32_t Ints4 __attribute__((vector_size(16)));
    Ints8 half[2];
    std::memcpy(half, &value, sizeof half);
    const Ints8 eight = join(half[0], half[1]);
    Ints4 four =
        join((Ints4)_mm256_castsi256_si128((__m256i)eight), (Ints4)_mm256_extracti128_si256((__m256i)eight, 1));
    four = join(four, (Ints4)_mm_shuffle_epi32((__m128i)four, 0x4e));
    four = join(four, (Ints4)_mm_shuffle_epi32((__m128i)four, 0xb1));
    return four[0];
#else
    std::int32_t result = value.part[0][0];
    for (int lane = 1; lane < kLanes; ++lane) result = join(result, value.part[lane / kPartLanes][lane % kPartLanes]);
    return result;
#endif
}

inline std::int32_t sum_int(const Ints& value) {
    return joined(value, [](const auto& a, const auto& b) { return a + b; });
}

inline std::int32_t highest_int(const Ints& value) {
    return joined(value, [](const auto& a, const auto& b) { return a < b ? b : a; });
}

// e to the x, to about one unit in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
//
// x = n ln 2 + f with |f| <= ln 2 / 2; e^f is a polynomial, and n goes into the exponent.
inline Floats exp(const Floats& x) {
    constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats lowest = broadcast(-87.33654F), largest = broadcast(88.72283F);
    const Floats below = broadcast(-127.0F), above = broadcast(128.0F);
    const Floats shifted = fma(x, broadcast(1.44269504F), broadcast(kRounding));
    Floats n = shifted - broadcast(kRounding);
    n = select(n < below, below, select(above < n, above, n));
    Floats f = fma(n, broadcast(-0.693359375F), x);
    f = fma(n, broadcast(2.12194440e-4F), f);
    Floats p = broadcast(1.9875691500e-4F);
    p = fma(p, f, broadcast(1.3981999507e-3F));
    p = fma(p, f, broadcast(8.3334519073e-3F));
    p = fma(p, f, broadcast(4.1665795894e-2F));
    p = fma(p, f, broadcast(1.6666665459e-1F));
    p = fma(p, f, broadcast(5.0000001201e-1F));
    p = fma(p, f * f, f + broadcast(1.0F));
    // 2^n in two factors, because 2^128 is no float.
    Floats result;
    QUIRE_FOR_PARTS(i) {
        const IntPart exponent = __builtin_convertvector(n.part[i], IntPart);
        const IntPart half = exponent >> 1;
        const FloatPart first = (FloatPart)((half + 127) << 23);
        const FloatPart second = (FloatPart)((exponent - half + 127) << 23);
        result.part[i] = p.part[i] * first * second;
    }
    result = select(x < lowest, broadcast(0.0F), result);
    return select(largest < x, broadcast(std::numeric_limits<float>::infinity()), result);
}

// tanh by e^2x: 1 - 2 / (e^2x + 1), odd by construction. Near 0 that would cancel, and an odd polynomial
// (Cephes) stands in.
inline Floats tanh(const Floats& x) {
    const Floats zero = broadcast(0.0F), one = broadcast(1.0F), two = broadcast(2.0F);
    const Mask negative = x < zero;
    const Floats size = select(negative, zero - x, x);
    const Floats result = one - two / (exp(size * two) + one);
    const Floats square = x * x;
    Floats p = broadcast(-5.70498872745e-3F);
    p = fma(p, square, broadcast(2.06390887954e-2F));
    p = fma(p, square, broadcast(-5.37397155531e-2F));
    p = fma(p, square, broadcast(1.33314422036e-1F));
    p = fma(p, square, broadcast(-3.33332819422e-1F));
    return select(size < broadcast(0.625F), fma(p * square, x, x), select(negative, zero - result, result));
}

}  // namespace quire::QUIRE_ISA
