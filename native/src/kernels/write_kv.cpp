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
        for (int i = 0; i < count; ++i) to[i] = nearest_bfloat16(from[i]);
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
void write_key(const PagedKv& kv, std::byte* head, int in_block, const float* key) {
    constexpr int kInputs = Step<Number>::kInputs;
    Number* keys = reinterpret_cast<Number*>(head);
    const int padded = key_stride<Number>(kv);
    write_row<kInputs>(
        key, kv.head_dim, padded,
        keys + static_cast<std::size_t>(in_block / kLanes) * kLanes * padded + in_block % kLanes * kInputs,
        kLanes * kInputs, scales_of(kv, keys) + in_block);
}

template <typename Number>
void write_value(const PagedKv& kv, std::byte* head, int in_block, const float* value) {
    constexpr int kInputs = Step<Number>::kInputs;
    Number* values = reinterpret_cast<Number*>(head);
    const int stride = kv.value_stride();
    write_row<1>(value, kv.head_dim, stride,
                 values + static_cast<std::size_t>(in_block / kInputs) * stride * kInputs + in_block % kInputs, kInputs,
                 scales_of(kv, values) + in_block);
}

// The numbers of a head, rotated, with zeros up to the value stride.
class Rotated {
  public:
    Rotated(const PagedKv& kv, const float* row) {
        std::memcpy(numbers_, row, kv.head_dim * sizeof(float));
        rotate_head(numbers_, kv.head_dim);
        std::memset(numbers_ + kv.head_dim, 0, (kv.value_stride() - kv.head_dim) * sizeof(float));
    }

    const float* data() const { return numbers_; }

  private:
    float numbers_[kMostInt4Numbers];
};

// Numbers beyond head_dim are arbitrary: they are multiplied by zeros of the query.
template <>
void write_key<CachedInt4>(const PagedKv& kv, std::byte* head, int in_block, const float* key) {
    constexpr int kTogether = 8;
    CachedInt4* keys = reinterpret_cast<CachedInt4*>(head);
    const Rotated rotated(kv, key);
    std::byte* to = head + static_cast<std::size_t>(in_block / kLanes) * kLanes * key_stride<CachedInt4>(kv) +
                    in_block % kLanes * sizeof(std::uint32_t);
    ScaleAndMinimum* scales = scales_of(kv, keys) + in_block;
    for (int start = 0; start < kv.head_dim; start += kInt4Group, scales += kv.block_size) {
        const float* group = rotated.data() + start;
        const Int4Quantizer quantizer(group, least(kInt4Group, kv.head_dim - start));
        *scales = quantizer.stored();
        for (int i = 0; i < kInt4Group; i += kTogether, to += kLanes * sizeof(std::uint32_t)) {
            std::uint32_t word = 0;
            for (int j = 0; j < kTogether; ++j) word |= quantizer.round(group[i + j]) << (j % 2 * 16 + j / 2 * 4);
            std::memcpy(to, &word, sizeof word);
        }
    }
}

// Numbers beyond head_dim are arbitrary: they are not part of an output.
template <>
void write_value<CachedInt4>(const PagedKv& kv, std::byte* head, int in_block, const float* value) {
    constexpr int kBytePlaces[kInt4Tokens] = {0, 2, 1, 3};  // of each token
    CachedInt4* values = reinterpret_cast<CachedInt4*>(head);
    const Rotated rotated(kv, value);
    const Int4Quantizer quantizer(rotated.data(), kv.head_dim);
    scales_of(kv, values)[in_block] = quantizer.stored();
    const int stride = kv.value_stride();
    CachedInt4* to = values + static_cast<std::size_t>(in_block / kInt4Tokens) * kInt4Tokens * stride / 2 +
                     kBytePlaces[in_block % kInt4Tokens];
    for (int start = 0; start < stride; start += kInt4Group) {
        const float* numbers = rotated.data() + start;
        for (int i = 0; i < kLanes; ++i, to += kInt4Tokens) {
            *to = static_cast<CachedInt4>(quantizer.round(numbers[i]) | quantizer.round(numbers[i + kLanes]) << 4);
        }
    }
}

template <typename Key, typename Value>
void write_of(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value) {
    const std::int64_t block = slot / kv.block_size;
    const int in_block = static_cast<int>(slot % kv.block_size);
    write_key<Key>(kv, kv.keys_of(block, kv_head), in_block, key);
    write_value<Value>(kv, kv.values_of(block, kv_head), in_block, value);
}

template <typename Number>
void write_latent(const PagedKv& kv, std::int64_t slot, const float* latent) {
    write_value<Number>(kv, kv.values_of(slot / kv.block_size, 0), static_cast<int>(slot % kv.block_size), latent);
}

}  // namespace

void write_kv(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value) {
    if (kv.latent_dim > 0) {
        if (kv.type == KvType::kFloat32) return write_latent<float>(kv, slot, key);
        return write_latent<std::uint16_t>(kv, slot, key);
    }
    switch (kv.type) {
        case KvType::kFloat32:
            return write_of<float, float>(kv, slot, kv_head, key, value);
        case KvType::kBfloat16:
            return write_of<std::uint16_t, std::uint16_t>(kv, slot, kv_head, key, value);
        case KvType::kInt8:
            return write_of<CachedInt8, CachedInt8>(kv, slot, kv_head, key, value);
        case KvType::kK8V4:
            return write_of<CachedInt8, CachedInt4>(kv, slot, kv_head, key, value);
        case KvType::kInt4:
            return write_of<CachedInt4, CachedInt4>(kv, slot, kv_head, key, value);
    }
}

}  // namespace quire::QUIRE_ISA
