// Writes keys and values to their blocks, rounded to the stored type.
#include <cstring>

#include "kernels_of_set.h"
#include "kv_layout.h"
#include "quantize.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Rounds the numbers of a key or a value to the stored type, 16 at a time.
template <typename Number>
class Stored;

template <>
class Stored<float> {
  public:
    Stored(const float*, int, float*) {}
    void round(const float* from, int count, float* to) const { std::memcpy(to, from, count * sizeof(float)); }
};

template <>
class Stored<std::uint16_t> {
  public:
    Stored(const float*, int, float*) {}
    void round(const float* from, int count, std::uint16_t* to) const {
        for (int i = 0; i < count; ++i) {
            std::uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            const std::uint32_t nearest = bits + 0x7fffU + ((bits >> 16) & 1U);  // ties to even
            const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;              // stays one
            to[i] = static_cast<std::uint16_t>((is_nan ? bits | 0x400000U : nearest) >> 16);
        }
    }
};

template <>
class Stored<CachedInt8> {
  public:
    Stored(const float* row, int count, float* scale) : quantizer_(quantizer_of(highest_size(row, count))) {
        *scale = quantizer_.scale;
    }
    void round(const float* from, int count, CachedInt8* to) const {
        quantize(from, count, quantizer_.factor, reinterpret_cast<std::int8_t*>(to));
    }

  private:
    const Quantizer quantizer_;
};

// Stores a row of a token: kTogether adjacent numbers, then the next ones `stride` later.
template <int kTogether, typename Number>
void write_row(const float* row, int count, int padded, Number* to, std::size_t stride, float* scale) {
    const Stored<Number> stored(row, count, scale);
    for (int start = 0; start < padded; start += kLanes) {
        Number rounded[kLanes] = {};
        stored.round(row + start, least(kLanes, count - start), rounded);
        const int end = least(kLanes, padded - start);
        for (int i = 0; i < end; i += kTogether, to += stride) std::memcpy(to, rounded + i, kTogether * sizeof(Number));
    }
}

template <typename Number>
void write_of(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value) {
    constexpr int kInputs = Step<Number>::kInputs;
    const std::size_t head = kv.head_offset(slot / kv.block_size, kv_head);
    const int in_block = static_cast<int>(slot % kv.block_size), stride = kv.value_stride();
    const int padded_key = key_stride<Number>(kv.head_dim);
    Number* keys = static_cast<Number*>(kv.keys) + head;
    Number* values = static_cast<Number*>(kv.values) + head;
    write_row<kInputs>(
        key, kv.head_dim, padded_key,
        keys + static_cast<std::size_t>(in_block / kLanes) * kLanes * padded_key + in_block % kLanes * kInputs,
        kLanes * kInputs, scales_of(kv, keys) + in_block);
    write_row<1>(value, kv.head_dim, stride,
                 values + static_cast<std::size_t>(in_block / kInputs) * stride * kInputs + in_block % kInputs, kInputs,
                 scales_of(kv, values) + in_block);
}

}  // namespace

void write_kv(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value) {
    switch (kv.type) {
        case NumberType::kFloat32:
            return write_of<float>(kv, slot, kv_head, key, value);
        case NumberType::kBfloat16:
            return write_of<std::uint16_t>(kv, slot, kv_head, key, value);
        case NumberType::kInt8:
            return write_of<CachedInt8>(kv, slot, kv_head, key, value);
        case NumberType::kCoded:
            return;  // only matrices are
    }
}

}  // namespace quire::QUIRE_ISA
