#include "quire/crc32.h"

#include <array>

#include "quire/cpu_features.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define QUIRE_X86_64 1
#include <immintrin.h>
#else
#define QUIRE_X86_64 0
#endif

// The bytes are a polynomial whose coefficients are bits, the lowest bit of each byte first, and the checksum is its
// remainder. The remainder does not change if 16 bytes are multiplied by x^n mod P and added to the bytes n bits later.
// So four streams of 16 bytes run through the data and are folded into one; the remaining 16 bytes are computed byte by
// byte.
//
//     bytes    │ 16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 5 │
//                └────── x^512 ─────►┘                          one of four streams
//                                    └x^128►┘                   the four into one
namespace quire {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;  // without x^32; the lowest bit is the coefficient of x^31

constexpr std::uint32_t times_x(std::uint32_t remainder) {
    return (remainder >> 1) ^ ((remainder & 1) != 0 ? kPolynomial : 0);
}

constexpr std::array<std::uint32_t, 256> make_table() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t remainder = byte;
        for (int bit = 0; bit < 8; ++bit) remainder = times_x(remainder);
        table[byte] = remainder;
    }
    return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

std::uint32_t byte_by_byte(const unsigned char* data, std::size_t size, std::uint32_t state) {
    for (std::size_t i = 0; i < size; ++i) state = (state >> 8) ^ kTable[(state ^ data[i]) & 0xFF];
    return state;
}

#if QUIRE_X86_64

constexpr std::size_t kChunk = 16, kStreams = 4;

// x^exponent mod P as a factor of 64 bits. In this order of bits a product is one bit position too low, so the factor
// is one higher.
constexpr long long power(int exponent) {
    std::uint32_t remainder = 1u << 31;  // 1
    for (int i = 0; i < exponent; ++i) remainder = times_x(remainder);
    return static_cast<long long>(static_cast<std::uint64_t>(remainder) << 1);
}

// The first 8 of the 16 bytes are 64 bits further from the later bytes than the last 8. A factor has 32 bits instead of
// 64, which lowers both exponents by 32.
template <int bits>
__attribute__((target("pclmul"))) __m128i folded(__m128i chunk, __m128i later) {
    const __m128i factors = _mm_set_epi64x(power(bits - 32), power(bits + 32));
    const __m128i first = _mm_clmulepi64_si128(chunk, factors, 0x00);
    const __m128i second = _mm_clmulepi64_si128(chunk, factors, 0x11);
    return _mm_xor_si128(later, _mm_xor_si128(first, second));
}

__m128i chunk_at(const unsigned char* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

__attribute__((target("pclmul"))) std::uint32_t by_products(const unsigned char* data, std::size_t size,
                                                            std::uint32_t state) {
    __m128i streams[kStreams];
    for (std::size_t i = 0; i < kStreams; ++i) streams[i] = chunk_at(data + i * kChunk);
    streams[0] = _mm_xor_si128(streams[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    std::size_t at = kStreams * kChunk;
    for (; at + kStreams * kChunk <= size; at += kStreams * kChunk) {
        for (std::size_t i = 0; i < kStreams; ++i) {
            streams[i] = folded<kStreams * kChunk * 8>(streams[i], chunk_at(data + at + i * kChunk));
        }
    }
    __m128i one = streams[0];
    for (std::size_t i = 1; i < kStreams; ++i) one = folded<kChunk * 8>(one, streams[i]);
    for (; at + kChunk <= size; at += kChunk) one = folded<kChunk * 8>(one, chunk_at(data + at));
    alignas(kChunk) unsigned char left[kChunk];
    _mm_store_si128(reinterpret_cast<__m128i*>(left), one);
    return byte_by_byte(data + at, size - at, byte_by_byte(left, kChunk, 0));
}

#endif

}  // namespace

std::uint32_t plain_crc32(const void* data, std::size_t size, std::uint32_t before) {
    return ~byte_by_byte(static_cast<const unsigned char*>(data), size, ~before);
}

std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before) {
#if QUIRE_X86_64
    if (size >= kStreams * kChunk && cpu_features().pclmulqdq) {
        return ~by_products(static_cast<const unsigned char*>(data), size, ~before);
    }
#endif
    return plain_crc32(data, size, before);
}

}  // namespace quire
